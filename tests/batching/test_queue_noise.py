"""No noise is drawn twice: a seat that is lost takes its round number with it."""

from __future__ import annotations

import pytest
from queue_cases import PROMPTS, SAMPLED, drafters, target

import hf_psd
from hf_psd.phases import Phase
from hf_psd.roster import Roster
from hf_psd.verification import Verifier


@pytest.mark.parametrize("mode", ["sd", "psd"])
def test_no_round_of_a_request_serves_two_drafts_or_two_verifications(monkeypatch, mode):
    drafted, verified = [], []
    draft, verify = Roster.draft, Verifier.__call__

    def keys(state, slots):
        return [(int(state.request[slot]), int(state.round[slot])) for slot in slots]

    def drafting(roster, state, requests, *rest):
        slots = [request.slot for request in requests]
        ids = draft(roster, state, requests, *rest)
        drafted.extend(key for key, row in zip(keys(state, slots), ids.tolist()) if row[0] >= 0)
        return ids

    def verifying(verifier, rows, *rest):
        alive = [slot for slot in rows.numbers if not verifier.state.done[slot]]
        verified.extend(keys(verifier.state, alive))
        return verify(verifier, rows, *rest)

    monkeypatch.setattr(Roster, "draft", drafting)
    monkeypatch.setattr(Verifier, "__call__", verifying)
    queue = hf_psd.ContinuousBatchingManager(
        target(), drafters("noisy"), psd=dict(mode=mode, seed=3), max_batch_size=4, block_size=4, check=True,
        max_new_tokens=20, temperature=1.5, **SAMPLED,
    )  # fmt: skip
    queue.add_requests(PROMPTS)
    unjudged = 0
    while queue.step():
        with queue._worker.work() as engine:
            engine.absorb_before(engine.step + 1)
            armed = [ticket for ticket in engine.tickets.values() if ticket.request.phase is Phase.HAS_DRAFT]
            if armed and engine.step % 5 == 0:
                engine.preempt(armed[0])
                unjudged += 1
    queue.stop()
    assert unjudged > 3 and all(result.error is None for result in queue)
    assert len(set(drafted)) == len(drafted) > 40, "a request drafted twice with the noise of one round"
    assert len(set(verified)) == len(verified) > 30, "a request was verified twice with the noise of one round"
