"""From one tokenizer's ids to another's by way of the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_CHUNK = 32
_LONGEST_CHUNK = 64
_ANCHOR = 8
_BROKEN = "\ufffd"  # what an incomplete character decodes to


class Translator:
    """Translates a target's ids into a drafter's and drafts back. Nothing here needs to be right for the output law.

    Args:
        target: the target's tokenizer.
        drafter: the drafter's.
    """

    def __init__(self, target: Any, drafter: Any):
        self.target, self.drafter = target, drafter
        self._target_specials = _specials(target)
        self._drafter_specials = _specials(drafter)
        drafter_vocab, target_vocab = drafter.get_vocab(), target.get_vocab()
        self._special_to_drafter = {id: drafter_vocab.get(text) for id, text in self._target_specials.items()}
        self._special_to_target = {id: target_vocab.get(text) for id, text in self._drafter_specials.items()}
        for role in ("bos_token_id", "eos_token_id"):
            ours, theirs = getattr(target, role), getattr(drafter, role)
            if ours is not None and theirs is not None:
                self._special_to_drafter[ours] = theirs
                self._special_to_target[theirs] = ours
        starts = drafter("a")["input_ids"][:1]
        self.start: list[int] = starts if starts == [drafter.bos_token_id] else []

    def to_drafter(self, ids: Sequence[int], before: Sequence[int] = ()) -> list[int]:
        """A piece of text in the drafter's ids; `before` are the target's ids in front of it."""
        out: list[int] = []
        run: list[int] = []
        previous = list(before[-1:])
        for id in (*ids, None):
            if id is not None and id not in self._target_specials:
                run.append(id)
                continue
            if run:
                out += _encode(self.drafter, _decode_after(self.target, previous, run))
                previous, run = run[-1:], []
            special = None if id is None else self._special_to_drafter.get(id)
            if special is not None and not (out == [] and not before and [special] == self.start):
                out.append(special)
        return out

    def to_target(self, text: Sequence[int], drafter_text: Sequence[int], drafts: Sequence[int]) -> list[int]:
        """Drafts in the target's ids, to follow the target's `text`, which is `drafter_text` for the drafter."""
        end: list[int] = []
        plain = list(drafts)
        for place, id in enumerate(drafts):
            if id in self._drafter_specials:
                special = self._special_to_target.get(id)
                plain, end = list(drafts[:place]), [] if special is None else [special]
                break
        new = _decode_after(self.drafter, drafter_text[-_ANCHOR:], plain).rstrip(_BROKEN) if plain else ""
        return (self._continue(text, new) if new else []) + end

    def _continue(self, text: Sequence[int], new: str) -> list[int]:
        """The target's ids of `new`, split as they would be after the end of `text`."""
        anchor = list(text[-_ANCHOR:])
        specials = [place for place, id in enumerate(anchor) if id in self._target_specials]
        anchor = anchor[specials[-1] + 1 :] if specials else anchor
        whole = _encode(self.target, _decode(self.target, anchor) + new)
        return whole[len(anchor) :] if whole[: len(anchor)] == anchor else _encode(self.target, new)

    def shared_ids(self) -> tuple[list[int], list[int]]:
        """Ids of the tokens both vocabularies have: the target's, and in the same order the drafter's; no id twice."""
        theirs: dict[str, int] = {}
        for text, id in self.drafter.get_vocab().items():
            theirs.setdefault(_spelling(text), id)
        pairs: dict[int, int] = {}
        for text, id in self.target.get_vocab().items():
            if _spelling(text) in theirs:
                pairs.setdefault(theirs[_spelling(text)], id)
        eos = self.target.eos_token_id, self.drafter.eos_token_id
        if None not in eos and eos[1] not in pairs and eos[0] not in pairs.values():
            pairs[eos[1]] = eos[0]
        return list(pairs.values()), list(pairs)


class GrowingText:
    """One row's text in the drafter's ids, translated piece by piece as it grows."""

    def __init__(self, translator: Translator):
        self._translator = translator
        self._closed = 0
        self._ids = list(translator.start)

    def translate(self, ids: Sequence[int]) -> list[int]:
        """The whole text; `ids` begins with what was given before."""
        while (cut := self._cut(ids)) is not None:
            self._ids += self._piece(ids, cut)
            self._closed = cut
        return self._ids + self._piece(ids, len(ids))

    def _piece(self, ids: Sequence[int], end: int) -> list[int]:
        return self._translator.to_drafter(ids[self._closed : end], ids[: self._closed])

    def _cut(self, ids: Sequence[int]) -> int | None:
        """Where the open piece can be closed: in front of a word, or anywhere once it has grown long."""
        if len(ids) - self._closed <= _LONGEST_CHUNK:
            return None
        first = self._closed + _CHUNK
        words = self._translator.target.convert_ids_to_tokens(list(ids[first : first + _CHUNK]))
        places = (first + place for place, word in enumerate(words) if _spelling(word or "").startswith(" "))
        return next(places, first + _CHUNK)


def _specials(tokenizer: Any) -> dict[int, str]:
    return dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens))


def _spelling(token: str) -> str:
    """A vocabulary entry with its blanks as blanks, whichever sign the tokenizer writes for them."""
    return token.replace("\u0120", " ").replace("\u2581", " ")


def _encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False) if text else []


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False) if ids else ""


def _decode_after(tokenizer: Any, before: Sequence[int], ids: Sequence[int]) -> str:
    """The text that `ids` add after `before`: decoders drop a blank at the very beginning."""
    head, whole = _decode(tokenizer, before), _decode(tokenizer, [*before, *ids])
    return whole[len(head) :] if whole.startswith(head) else _decode(tokenizer, ids)
