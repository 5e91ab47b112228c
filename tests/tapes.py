"""CUDA graphs played by the CPU: a capture records every operator with its tensors, a replay runs them on these again.

So a replay sees what a CUDA graph would see: nothing of the host, and of the device only what lies where it lay at the
capture. A second device is played by the CPU under another number.
"""

from __future__ import annotations

import contextlib

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import hf_psd.drafters.model
from hf_psd.graphs import StepGraphs
from hf_psd.lanes import HostRing
from hf_psd.roster import Roster
from hf_psd.workspace import Workspace

FAR = torch.device("cpu", 1)
_WAITS = ("_local_scalar_dense", "lift_fresh", "nonzero", "masked_select", "_unique2")


class TapeGraph(TorchDispatchMode):
    """Stands for `torch.cuda.CUDAGraph`."""

    def __init__(self):
        super().__init__()
        self.tape, self.replays = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(name in str(func) for name in _WAITS):
            raise RuntimeError(f"{func} in a capture: the host would wait, or its values be built in")
        out = func(*args, **(kwargs or {}))
        self.tape.append((func, args, kwargs or {}, out))
        return out

    def replay(self):
        self.replays += 1
        for func, args, kwargs, out in self.tape:
            new = func(*args, **kwargs)
            for old, fresh in zip(tree_leaves(out), tree_leaves(new)):
                if isinstance(old, torch.Tensor) and old.data_ptr() != fresh.data_ptr():
                    old.copy_(fresh)


@contextlib.contextmanager
def capture(graph, **settings):
    """Stands for `torch.cuda.graph`."""
    capturing.append(graph)
    try:
        with graph:
            yield
    finally:
        capturing.pop()


capturing: list[TapeGraph] = []
"""The capture that is under way, if any."""


def play(patch, far=(), far_captures=True):
    """Lets calls of `generate` capture and replay; gives a list of what was captured.

    Drafters in `far` live on the second device, whose work cannot be captured, as a CPU's, unless `far_captures`.
    """
    graphs = []
    original, input_device, push = StepGraphs._capture, hf_psd.drafters.model.input_device, HostRing.push

    def captured(own, rows, function):
        result = original(own, rows, function)
        graphs.append(result)
        return result

    def graphs_on(space, device):
        if space.draft_graphs is None or (device == FAR and not far_captures):
            return None
        return space.draft_graphs if device == space.runner.device else space.graphs_on(device)

    patch.setattr(torch.cuda, "CUDAGraph", TapeGraph)
    patch.setattr(torch.cuda, "graph", capture)
    patch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    patch.setattr(StepGraphs, "_capture", captured)
    patch.setattr(Roster, "_on_cuda", lambda roster, drafter: far_captures or drafter.device != FAR)
    patch.setattr("hf_psd.engine.may_graph", lambda model, wanted, *args: wanted is not False)
    patch.setattr("hf_psd.drafters.model.input_device", lambda model: FAR if model in far else input_device(model))
    patch.setattr("hf_psd.drafters.model.ModelDrafter.capturable", property(lambda self: True, lambda *_: None))
    patch.setattr(Workspace, "draft_graphs_on", graphs_on)
    # The CPU's ring copies nothing, but the next replay overwrites what this one gave.
    patch.setattr(HostRing, "push", lambda ring, label, packet: push(ring, label, packet.clone()))
    return graphs
