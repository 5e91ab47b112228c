"""The calls of quickstart.ipynb on tiny random models, so they run anywhere.

With models of your own, replace the two `LlamaForCausalLM(...)` by `AutoModelForCausalLM.from_pretrained(...)`.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_psd

shape = {"vocab_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 2}
torch.manual_seed(0)
target = LlamaForCausalLM(LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=4, **shape)).eval()
drafter = LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, **shape)).eval()
drafters = ["prompt_lookup", drafter]

inputs = {
    "input_ids": torch.tensor([[0, 0, 11, 12, 13], [21, 22, 23, 24, 25]]),
    "attention_mask": torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]),
}
greedy = {"max_new_tokens": 32, "do_sample": False}
plain = target.generate(**inputs, **greedy)
out = target.generate(**inputs, **greedy, assistant_models=drafters, psd=True)
print("same tokens as plain generate:", torch.equal(plain, out))

target.generate(**inputs, **greedy, assistant_models=drafters, psd={"mode": "sd"})
stats = hf_psd.last_stats()
print(f"{stats.tokens_per_forward:.2f} tokens per target forward and row, {stats.acceptance:.0%} of drafts accepted")
print(hf_psd.explain(target, drafters, **inputs))

coupled = {"verification": "coupled", "seed": 7}
sampled = target.generate(**inputs, max_new_tokens=32, do_sample=True, assistant_models=drafters, psd=coupled)
without = target.generate(**inputs, max_new_tokens=32, do_sample=True, psd=coupled | {"mode": "ar"})
print("same sampled tokens with and without drafts:", torch.equal(sampled, without))


class Printer(hf_psd.RowStreamer):
    def put_row(self, row: int, ids: list[int]) -> None:
        print(f"row {row}: {ids}")


target.generate(**inputs, max_new_tokens=8, do_sample=False, assistant_models=drafters, psd=True, streamer=Printer())

prompts = [[11, 12, 13], [21, 22, 23, 24, 25], [31]]
results = hf_psd.generate_batch(target, prompts, assistant_models=drafters, max_batch_size=2, **greedy)
for name, result in results.items():
    print(name, len(result.generated_tokens), "tokens")
