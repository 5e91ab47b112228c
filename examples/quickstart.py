"""The smallest use: a batch of prompts, two drafters, `psd=True`. Models are random and tiny, so it runs anywhere.

With models of your own, replace the two `LlamaForCausalLM(...)` by `AutoModelForCausalLM.from_pretrained(...)`.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_psd

shape = {"vocab_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 2}
torch.manual_seed(0)
target = LlamaForCausalLM(LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=4, **shape)).eval()
drafter = LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, **shape)).eval()

inputs = {
    "input_ids": torch.tensor([[0, 0, 11, 12, 13], [21, 22, 23, 24, 25]]),
    "attention_mask": torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]),
}
plain = target.generate(**inputs, max_new_tokens=32, do_sample=False)
out = target.generate(
    **inputs, max_new_tokens=32, do_sample=False, assistant_models=["prompt_lookup", drafter], psd=True
)

print("same tokens as plain generate:", torch.equal(plain, out))
stats = hf_psd.last_stats()
print(f"{stats.tokens_per_forward:.2f} tokens per target forward and row, {stats.acceptance:.0%} of drafts accepted")
