"""The step loop runs on the kernels: spied on in a process of its own, where Triton's interpreter stands in for a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

PROGRAM = """
import json, sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM
import hf_psd
from psd_kernels import naive, sample_kernel, verify_launch

calls = {}

def spy(module, name):
    real = getattr(module, name)
    def counted(*args, **kwargs):
        calls[name] = calls.get(name, 0) + 1
        return real(*args, **kwargs)
    setattr(module, name, counted)

spy(verify_launch, "launch_verify"), spy(sample_kernel, "launch_sample")
spy(naive, "verify"), spy(naive, "sample")

def tiny(seed):
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )).eval()

ids = torch.tensor([[3, 4, 5], [6, 7, 8]])
tiny(0).generate(
    ids, attention_mask=torch.ones_like(ids), assistant_models=[tiny(1)], do_sample=sys.argv[1] == "sampled",
    psd={"mode": "sd", "gamma": 2, "seed": 3, "verification": sys.argv[2], "selector": "ucb1"}, max_new_tokens=6,
    eos_token_id=None, pad_token_id=0,
)
stats = hf_psd.last_stats()
print(json.dumps(calls | {"verified": stats.target_forwards, "drafted": stats.drafted, "forwards": stats.draft_forwards}))
"""


@pytest.mark.parametrize(
    ("decoding", "law"), [("greedy", "rejection"), ("sampled", "rejection"), ("sampled", "coupled")]
)
def test_every_round_is_drawn_and_judged_by_the_kernels(decoding, law):
    variables = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, decoding, law], env=variables, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["drafted"] > 0
    assert seen["launch_verify"] == seen["verified"]
    assert seen["launch_sample"] == seen["forwards"]
    assert "verify" not in seen and "sample" not in seen  # nothing fell back to the specification
