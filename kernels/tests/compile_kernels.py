"""Compiles every kernel for one compute capability, without a device: `python compile_kernels.py 90 [--all]`."""

from __future__ import annotations

import os
import sys
from itertools import product
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "torch-ext"))

import triton
from psd_kernels import accept_kernel, attention_kernel, sample_kernel, verify_decide, verify_scan
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

FLOATS = {75: ("fp16", "fp32")}
TYPES = {
    "target_ptr": "*{f}", "draft_ptr": "*{f}", "logits_ptr": "*{f}", "query_ptr": "*{f}", "key_ptr": "*{f}",
    "value_ptr": "*{f}", "new_key_ptr": "*{f}", "new_value_ptr": "*{f}", "out_ptr": "*{f}", "sink_ptr": "*{f}",
    "ids_ptr": "*i64", "point_ptr": "*u8", "position_ptr": "*i64", "request_ptr": "*i64", "round_ptr": "*i64",
    "seed_ptr": "*i64", "which_ptr": "*i32", "token_ptr": "*i32", "ticket_ptr": "*i32", "table_ptr": "*i64",
    "positions_ptr": "*i64", "out_ids_ptr": "*i64", "out_id_ptr": "*i64", "out_count_ptr": "*i64", "first_ptr": "*i64",
    "out_bad_ptr": "*u8", "accepted_ptr": "*u8", "scaling": "fp32",
}  # fmt: skip


def build(
    kernel, capability: int, dtype: str, warps: int, unit_strides: tuple[str, ...] = (), drafts: str | None = None,
    **constants,
):  # fmt: skip
    """Compiles one variant; pointers and sizes count as divisible by 16, `unit_strides` are the constant 1.

    `drafts`: dtype of the draft's logits, where it is not the target's.
    """
    constants |= dict.fromkeys(unit_strides, 1)
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        fallback = "*fp32" if name.endswith("_ptr") else "i32"
        signature[name] = TYPES.get(name, fallback).format(f=drafts if drafts and name == "draft_ptr" else dtype)
        if name.endswith("_ptr") or name in ("vocab", "draft_vocab"):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})


def variants(capability: int, everything: bool):
    """(name, compiled kernel) with the flags of a full call; without `everything` one dtype and layout of each."""
    for dtype in FLOATS.get(capability, ("bf16", "fp16", "fp32"))[: None if everything else 1]:
        for law, unit in product((1, 2, 0), (16, 1)) if everything else ((1, 16), (2, 1)):
            flags = {"LAW": law, "HAS_POINT": True, "HAS_SEED": True, "UNIT": unit, "SPLITS": 32}
            flags["EARLY"] = capability >= 90
            rest = {"HAS_DRAFT": True, "LENGTH": 16, "RACE_SPLITS": 64, "BLOCK": 2048}
            # The step loop keeps the scores of drafts in fp32 whatever the models are in.
            for drafts in (dtype, "fp32") if dtype != "fp32" else (dtype,):
                given = (capability, dtype, 4, ("target_v", "draft_v"), drafts)
                name = f"{dtype} and {drafts} law {law} unit {unit}"
                yield f"scan {name}", build(verify_scan.verify_scan_kernel, *given, **flags, BLOCK=2048)
                yield f"decide {name}", build(verify_decide.verify_decide_kernel, *given, **flags, **rest)
        for greedy in (False, True)[: 2 if everything else 1]:
            flags = {"GREEDY": greedy, "UNIT": 16, "SPLITS": 64}
            yield (
                f"sample scan {dtype} {greedy}",
                build(
                    sample_kernel.sample_scan_kernel,
                    capability,
                    dtype,
                    4,
                    ("logits_v",),
                    **flags,
                    HAS_SEED=True,
                    BLOCK=1024,
                ),
            )
            yield (
                f"sample join {dtype} {greedy}",
                build(sample_kernel.sample_join_kernel, capability, dtype, 1, ("logits_v",), **flags),
            )
        for uniforms in (False, True)[: 2 if everything else 1]:
            yield (
                f"accept {dtype} {uniforms}",
                build(
                    accept_kernel.accept_kernel,
                    capability,
                    dtype,
                    1,
                    HAS_UNIFORM=uniforms,
                    HAS_SEED=True,
                    ROWS=8,
                    COUNT=16,
                ),
            )
        shapes = ((128, True, 1024), (64, False, 0), (80, True, 0), (96, False, 0), (256, True, 0))
        for dim, paged, window in shapes[: None if everything else 1]:
            flags = {"DIM": dim, "DIM_BLOCK": triton.next_power_of_2(dim)}
            yield f"attention {dtype} {dim} {paged} {window}", build(
                attention_kernel.attention_split_kernel, capability, dtype, 4, **flags,
                GROUP=4, PAGED=paged, WHOLE=paged, WINDOW=window, SOFTCAP=30.0 if window else 0.0,
                PRECISION="tf32x3" if capability >= 80 else "ieee", UNIT=16, BLOCK_M=32,
                BLOCK_N=64 if dim <= 128 and dtype != "fp32" else 32,
            )  # fmt: skip
            yield (
                f"join {dtype} {dim}",
                build(attention_kernel.attention_join_kernel, capability, dtype, 2, **flags, HAS_SINK=True, SPLITS=8),
            )
        yield f"kv write {dtype}", build(attention_kernel.kv_write_kernel, capability, dtype, 4, DIM=128, BLOCK=1024)


if __name__ == "__main__":
    count = 0
    for name, compiled in variants(int(sys.argv[1]), "--all" in sys.argv):
        assert compiled.asm["cubin"], name
        count += 1
    print(f"{count} kernels")
