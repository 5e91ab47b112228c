"""`hf-psd bench`: one run, the same prompts and models for plain transformers and for this package's modes."""
