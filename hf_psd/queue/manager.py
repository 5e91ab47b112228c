"""The door to a running queue: add requests from any thread, take results as they come."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from .. import api
from ..arguments import resolve_drafters, resolve_target
from ..config import PSDConfig
from ..drafters.base import Drafter
from ..hooks import StepHook, StepHookList
from ..ledger import Ledger
from ..runner import input_device
from .engine import QueueEngine
from .mailbox import Mailbox
from .metrics import QueueStats, prometheus
from .results import Result
from .settings import SettingsDesk, prompt_of
from .sizes import CHUNK, Sizes, measure
from .ticket import Ticket
from .worker import Worker


class ContinuousBatchingManager:
    """A queue of requests over one target and its drafters, in the manner of transformers' class of this name.

    Requests are seated first come, first served; a seat is given to the next request as soon as it is free. Each
    request has the settings of `generate` it was added with, and its text is what `generate` gives for it alone:
    token for token when greedy (fp32) or with `verification="coupled"`, by law otherwise.

    Use it as a context manager, or call `start` and `stop`. Requests may be added before the start.

    Args:
        model: the target.
        assistant_models: as for `generate`.
        generation_config: defaults for all requests.
        psd: True, a `PSDConfig` or a dict of its fields; `max_batch_size`, `block_size`, `kv_memory` size the queue.
        psd_hooks: `StepHook` objects; an exception in one ends the requests it was told of.
        max_batch_size: seats, default 32.
        block_size: tokens per KV block, default 64 on CUDA and 32 elsewhere.
        kv_memory: bytes of KV cache of all models together; default what the seats need, at most 80 % of the free
            memory on CUDA and 25 % on the CPU.
        prefill_chunk: most prompt tokens read per step, default 512: nobody waits for a longer prompt than that.
        return_logprobs: fill `Result.logprobs`.
        check: after each step make sure that nothing is lost, shared or out of balance (slow, for tests).
        **kwargs: arguments of `generate`, defaults for all requests.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        assistant_models: Sequence[Any] | None = None,
        generation_config: GenerationConfig | None = None,
        psd: PSDConfig | Mapping[str, Any] | bool = True,
        psd_hooks: Sequence[StepHook] = (),
        *,
        max_batch_size: int | None = None,
        block_size: int | None = None,
        kv_memory: int | None = None,
        prefill_chunk: int = CHUNK,
        return_logprobs: bool = False,
        check: bool = False,
        **kwargs: Any,
    ):
        sizes: dict[str, Any] = {
            "max_batch_size": max_batch_size, "block_size": block_size, "kv_memory": kv_memory
        }  # fmt: skip
        config = replace(PSDConfig.resolve(psd), **{name: size for name, size in sizes.items() if size is not None})
        if config.request_ids is not None:
            raise ValueError("psd: request_ids belong to `generate`; give add_request(noise_id=...) instead.")
        if not (config.context is None or isinstance(config.context, str)):
            raise ValueError("psd: a queue has one context tag for all its requests, not one per row.")
        if not isinstance(prefill_chunk, int) or prefill_chunk < 1:
            raise ValueError(f"psd: prefill_chunk must be an int >= 1, got {prefill_chunk!r}.")
        self.model = resolve_target(model, api.plain_generate(), kwargs)
        self.drafters = resolve_drafters(self.model, assistant_models, kwargs)
        self._device = input_device(self.model)
        self.config = replace(config, mode=_mode(config, self.drafters, self._device))
        self.seed = int(torch.randint(2**62, (1,), device="cpu")) if config.seed is None else config.seed
        if generation_config is not None:
            kwargs["generation_config"] = generation_config
        self.desk = SettingsDesk(self.model, api.plain_generate(), kwargs, config.verification, self.seed)
        self.stats = QueueStats()
        self.chunk = prefill_chunk
        self.fatal_error: BaseException | None = None
        self._sizes: Sizes | None = None
        self._open_ended = True
        self._worker = Worker(
            self.model, self.drafters, self.config, StepHookList(psd_hooks), self.stats, self._fix_sizes,
            return_logprobs, self.seed, check,
        )  # fmt: skip
        api.remember(self.stats)
        self._thread: threading.Thread | None = None
        self._inbox: queue.SimpleQueue[tuple[str, Ticket]] = queue.SimpleQueue()
        self._mail = Mailbox()
        self._wake, self._lock = threading.Event(), threading.RLock()
        self._stopping: str | None = None
        self._tickets: dict[str, Ticket] = {}
        self._numbers, self._names = 0, 0

    def add_request(
        self,
        input_ids: Sequence[int] | torch.Tensor,
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | list[int] | None = None,
        *,
        seed: int | None = None,
        noise_id: int | None = None,
        streamer: Any = None,
        **kwargs: Any,
    ) -> str:
        """Adds a request; may be called from any thread.

        Args:
            input_ids: prompt, [P] ids without padding.
            request_id: its name; default "req_0", "req_1", ...
            max_new_tokens, eos_token_id: as in `generate`.
            streaming: deliver a result at each commit, not only at the end.
            record_timestamps: fill `Result.timestamps`.
            seed: noise of its own; alone it then equals `generate(prompt, psd={"seed": seed})`. Default: the queue's.
            noise_id: the request's key under that seed, what `request_ids` is to `generate`; default 0 with a seed of
                its own, else the number of requests added before.
            streamer: a transformers streamer for this request alone.
            **kwargs: any other argument of `generate`, `tokenizer` with `stop_strings` included.

        Returns:
            The request's name.

        Raises:
            ValueError, TypeError: for what `generate` would refuse, and for a request that could never run.
            RuntimeError: the queue is stopping, or has failed.
        """
        prompt = prompt_of(input_ids)
        if max_new_tokens is not None:
            kwargs["max_new_tokens"] = max_new_tokens
        if eos_token_id is not None:
            kwargs["eos_token_id"] = eos_token_id
        if noise_id is not None and not 0 <= noise_id < 2**31:
            raise ValueError(f"psd: noise_id must lie in 0 .. 2**31 - 1, got {noise_id!r}.")
        settings = self.desk.settle(prompt, seed, kwargs)
        with self._lock:
            if self._stopping is not None or self.fatal_error is not None:
                raise RuntimeError("psd: the queue takes no requests any more.") from self.fatal_error
            name = self._name(request_id)
            number, self._numbers = self._numbers, self._numbers + 1
            ledger = Ledger(
                torch.tensor([prompt], device="cpu"),
                settings.rules,
                settings.pad_id,
                self._device,
                track_columns=False,
            )
            noise = noise_id if noise_id is not None else number if seed is None else 0
            result = Result(name, prompt, timestamps=[] if record_timestamps else None)
            ticket = Ticket(number, result, settings, noise, ledger, self._deliver, streaming, streamer)
            if self._sizes is not None or self.config.kv_memory is not None:
                self._fix_sizes().check(ticket.limit)
            self._tickets[name] = ticket
            self._inbox.put(("add", ticket))
        self._wake.set()
        return name

    @property
    def total(self) -> int:
        """Requests added so far."""
        return self._numbers

    @property
    def captured(self) -> int:
        """CUDA graphs that the open queue has captured, since it was last widened."""
        return 0 if self._worker.engine is None else self._worker.engine.space.captured

    def add_requests(self, inputs: Sequence[Sequence[int]], **kwargs: Any) -> list[str]:
        """`add_request` for each of several prompts."""
        return [self.add_request(prompt, **kwargs) for prompt in inputs]

    def cancel(self, request_id: str) -> None:
        """Ends a request before its time; its result has the tokens so far and `RequestCancelled`."""
        with self._lock:
            ticket = self._tickets.get(request_id)
            if ticket is not None:
                self._inbox.put(("cancel", ticket))
        self._wake.set()

    cancel_request = cancel

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> Result | None:
        """The next result, of any request or of one; None after `timeout` seconds, or if none can come any more."""
        return self._mail.get(request_id, timeout, lambda: self._more_may_come(request_id))

    def iter(self, request_id: str | None = None) -> Iterator[Result]:
        """Results as they come, of all requests until all have ended, or of one until it has."""
        while True:
            result = self.get_result(request_id)
            if result is None:
                return
            yield result
            if request_id is not None and result.is_finished():
                return

    def __iter__(self) -> Iterator[Result]:
        return self.iter()

    request_id_iter = iter

    def is_running(self) -> bool:
        """Whether the thread that generates is alive."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Starts generating, in a thread of its own."""
        if not self.is_running():
            self._stopping = None
            self._thread = threading.Thread(target=self._serve, name="hf_psd queue", daemon=True)
            self._thread.start()

    def stop(self, block: bool = True, timeout: float | None = None, hard_stop: bool = False) -> None:
        """Stops when all requests have ended, or at once (`hard_stop`: what is not done is cancelled)."""
        with self._lock:
            self._stopping = "now" if hard_stop else self._stopping or "when done"
        self._wake.set()
        if not self.is_running():
            if self._worker.engine is not None or self._tickets:
                with self._worker.work() as engine:
                    while self._turn(engine):
                        pass
                self._worker.close()
        elif self._thread is not None and block:
            self._thread.join(timeout)
            if not self._thread.is_alive():
                self._thread = None

    def __enter__(self) -> ContinuousBatchingManager:
        self.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.stop(hard_stop=error is not None)

    def metrics(self) -> str:
        """The statistics as Prometheus text."""
        return prometheus(self.stats)

    def step(self) -> bool:
        """One step in the calling thread, for those who drive the queue themselves; False when nothing is left.

        Call `stop` in the end.
        """
        with self._worker.work() as engine:
            return self._turn(engine)

    def run_to_end(self, tick: Callable[[int], Any] | None = None) -> list[Result]:
        """Generates in the calling thread until every request has ended, then stops.

        Args:
            tick: called with the number of requests that have ended since the last call.

        Returns:
            The last result of each request, in order of arrival.
        """
        self._open_ended = False
        results = self.drain(tick)
        self._worker.close()
        return results

    def drain(self, tick: Callable[[int], Any] | None = None) -> list[Result]:
        """As `run_to_end`, but the queue stays open for more, with its KV and its captured graphs.

        Results that were there before come first. Call `stop` in the end.
        """
        numbers = {name: ticket.number for name, ticket in self._tickets.items()}
        results: list[Result] = []

        def collect() -> int:
            new = [result for result in self._mail.take_all() if result.is_finished()]
            results.extend(new)
            return len(new)

        try:
            with self._worker.work() as engine:
                while self._turn(engine):
                    ended = collect()
                    if tick is not None and ended:
                        tick(ended)
        except BaseException as error:
            self._collapse(error)
            raise
        collect()
        return sorted(results, key=lambda result: numbers.get(result.request_id, -1))

    def _serve(self) -> None:
        try:
            while True:
                self._wake.wait()
                self._wake.clear()
                with self._worker.work() as engine:
                    while self._turn(engine):
                        pass
                with self._lock:
                    if self._stopping is not None and self._inbox.empty():
                        break
            self._worker.close()
        except BaseException as error:
            self._collapse(error)

    def _turn(self, engine: QueueEngine) -> bool:
        """Takes in what was added and cancelled, and does one step; False when there is nothing left to do."""
        while not self._inbox.empty():
            what, ticket = self._inbox.get()
            if what == "add":
                engine.join(ticket)
            else:
                engine.cancel(ticket)
        if self._stopping == "now":
            engine.cancel_all()
            return False
        return engine.turn()

    def _collapse(self, error: BaseException) -> None:
        """The step loop itself has failed: every request ends with its error."""
        with self._lock:
            self.fatal_error = error
        self._worker.close(error)
        for ticket in list(self._tickets.values()):
            if not ticket.ended:
                ticket.end(error)

    def _deliver(self, result: Result) -> None:
        self._mail.put(result)
        if result.is_finished():
            with self._lock:
                self._tickets.pop(result.request_id, None)

    def _more_may_come(self, request_id: str | None) -> bool:
        with self._lock:
            return self.is_running() and (bool(self._tickets) if request_id is None else request_id in self._tickets)

    def _name(self, request_id: str | None) -> str:
        if request_id is not None:
            if request_id in self._tickets:
                raise ValueError(f"psd: a request named {request_id!r} is under way; names must differ.")
            return request_id
        while f"req_{self._names}" in self._tickets:
            self._names += 1
        self._names += 1
        return f"req_{self._names - 1}"

    def _fix_sizes(self) -> Sizes:
        """The queue's sizes, which the first who asks fixes."""
        with self._lock:
            if self._sizes is None:
                limits = [ticket.limit for ticket in self._tickets.values()]
                self._sizes = measure(
                    self.config, self._worker.models, self._device, self.chunk, limits, complete=not self._open_ended
                )
            return self._sizes


def _mode(config: PSDConfig, drafters: Sequence[Drafter], device: torch.device) -> str:
    """ "auto" is two groups where a drafter has a device of its own, else one."""
    if config.mode != "auto":
        return config.mode
    return "psd" if any(drafter.device not in (None, device) for drafter in drafters) else "sd"
