"""The serving thread's work: arrays from the wire to tensors, through a block, and back."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from protocol.errors import WireError
from protocol.parcel import LOG_FLOOR, Outcome, Parcel
from protocol.serving import Mode, Sweep
from swarm.learning.joint_denoising import JointDenoising
from swarm.learning.model import Block, LayerCache
from swarm.writing.denoise import choose_bytes
from swarm.writing.generate import Sampling
from swarm.writing.sweep import (
    Cache,
    DraftOrder,
    Passage,
    byte_scores,
    denoise,
    draft,
    draft_parts,
    finish,
    score,
)


@dataclass
class Session:
    """A block's key/value caches for one client's text, or for the drafts of a sweep in parts."""

    cache: Cache
    used_s: float = 0.0
    last: Tensor | None = None  # (drafts, 1, width): the hidden state at the end of the last part

    @property
    def length(self) -> int:
        return self.cache[0].length


class LostCache(WireError):
    """The caches are shorter than the sweep expects: it has to start again."""


def sampling_of(sweep: Sweep) -> Sampling:
    return Sampling(sweep.temperature, sweep.top_k, sweep.seed)


def compute(
    block: Block, work: Sequence[tuple[Sweep, Parcel]], sessions: Sequence[Session] = ()
) -> list[Passage]:
    """Pass sweeps of one shape through one block: drafting at the first place, else scoring.

    Verifications and sweeps in parts have a session each; all are truncated to the same start.
    """
    first = work[0][0]
    bonus = first.mode == Mode.VERIFY
    cache = last = None
    for session in sessions:
        if session.length < first.read:
            raise LostCache("the caches are gone")
        for layer in session.cache:
            layer.truncate(first.read)
    if sessions:
        cache = sessions[0].cache if len(sessions) == 1 else _joined(sessions)
    passages, orders, weight = _given(block, work)
    if first.place == 0:
        return _parted(draft(block, passages, orders, weight, bonus, cache), cache, sessions)
    if first.part:
        last = torch.cat([_there(session.last) for session in sessions])
    passed = score(block, passages, weight, bonus, cache, last)
    if first.parts > 1:
        for session, passage in zip(sessions, passed, strict=True):
            session.last = _there(passage.hidden_drafts)[:, -1:].clone()
    return _parted(passed, cache, sessions)


def compute_parts(
    block: Block, work: Sequence[tuple[Sweep, Parcel]], parts: int
) -> Generator[list[Passage], None, None]:
    """Write whole drafts, yielding them in `parts` pieces."""
    passages, orders, weight = _given(block, work)
    yield from draft_parts(block, passages, orders, weight, False, parts)


def _given(
    block: Block, work: Sequence[tuple[Sweep, Parcel]]
) -> tuple[list[Passage], list[DraftOrder], float]:
    sweep, device = work[0][0], block.embedding.weight.device
    passages = [passage_of(sweep, parcel, device) for sweep, parcel in work]
    orders = [DraftOrder(s.drafts, s.length, sampling_of(s), s.composed) for s, _ in work]
    return passages, orders, sweep.hops()[sweep.place].weight


def compute_joint(
    joint: JointDenoising, block: Block, work: Sequence[tuple[Sweep, Parcel]]
) -> list[Passage]:
    """Pass sweeps of joint denoising through one block. At the first place z is drawn as noise."""
    index, device = work[0][0].block, block.embedding.weight.device
    joint = joint.on(device)
    passages = []
    for sweep, parcel in work:
        passage = passage_of(sweep, parcel, device)
        if sweep.place == 0:
            passage = replace(passage, z=joint.first_z(index, sweep.length, sweep.seed))
        passages.append(passage)
    return denoise(joint, block, index, passages)


def _joined(sessions: Sequence[Session]) -> Cache:
    """The caches of several texts of equal length, joined into those of one batch."""
    joined: Cache = []
    for layers in zip(*(session.cache for session in sessions), strict=True):
        one = LayerCache()
        if layers[0].length:
            one.keys = torch.cat([_there(layer.keys) for layer in layers])
            one.values = torch.cat([_there(layer.values) for layer in layers])
        joined.append(one)
    return joined


def _parted(
    passed: list[Passage], joined: Cache | None, sessions: Sequence[Session]
) -> list[Passage]:
    """Copy the batch's caches back into the sessions (a view would keep the whole batch)."""
    if joined is None or len(sessions) == 1:
        return passed
    for index, session in enumerate(sessions):
        for layer, one in zip(session.cache, joined, strict=True):
            keys, values = _there(one.keys), _there(one.values)
            rows = len(keys) // len(sessions)  # one, or as many as drafts
            own = slice(index * rows, (index + 1) * rows)
            layer.keys, layer.values = keys[own].clone(), values[own].clone()
    return passed


def _there(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


def passage_of(sweep: Sweep, parcel: Parcel, device: torch.device) -> Passage:
    def tensor(array: object, dtype: torch.dtype = torch.float32) -> Tensor | None:
        if array is None:
            return None
        return torch.from_numpy(np.array(array)).to(device, dtype)

    context = tensor(parcel.context, torch.int64)
    drafts = tensor(parcel.drafts, torch.int64) if sweep.place else None
    if drafts is None:  # not written yet
        drafts = torch.zeros(0, 0, dtype=torch.int64, device=device)
    assert context is not None
    return Passage(
        context,
        drafts,
        tensor(parcel.hidden_context),
        tensor(parcel.hidden_drafts),
        tensor(parcel.state),
        sweep.weight,
        tensor(parcel.drafted),
        tensor(parcel.z),
    )


def parcel_of(sweep: Sweep, passage: Passage) -> Parcel:
    """The payload for the next host.

    With whole drafts hidden states are sent in few bits, and normalised so that no value is too
    large for them: the next block normalises its input anyway.
    """
    context, drafts = passage.hidden_context, passage.hidden_drafts
    if sweep.hidden and sweep.mode == Mode.ONE_SWEEP and context is not None and drafts is not None:
        context = F.rms_norm(context, context.shape[-1:])
        drafts = F.rms_norm(drafts, drafts.shape[-1:])
    return Parcel(
        _bytes(passage.context),
        _bytes(passage.drafts),
        _drafted(sweep, passage),
        _array(context) if sweep.hidden else None,
        _array(drafts) if sweep.hidden else None,
        _array(passage.state),
        None if passage.denoised is None else _array(passage.denoised.z_for(sweep.block)),
    )


def outcome_of(sweep: Sweep, passage: Passage) -> Outcome:
    """The result for the client, from the composed log-probabilities."""
    if passage.denoised is not None:
        posterior = passage.denoised.posterior.cpu()
        chosen = choose_bytes(posterior, sampling_of(sweep))
        own = byte_scores(posterior, chosen, sampling_of(sweep)).clamp_min(LOG_FLOOR)
        return Outcome(_bytes(chosen[None]), scores=_array(own[None]))
    composed = finish(passage, sweep.composed)
    outcome = Outcome(_bytes(passage.drafts), _drafted(sweep, passage))
    if sweep.mode == Mode.ONE_SWEEP:
        scores = byte_scores(composed, passage.drafts, sampling_of(sweep))
        return replace(outcome, scores=_array(scores.clamp_min(LOG_FLOOR)))
    if sweep.temperature > 0:
        return replace(outcome, log_probs=_array(composed[0]))
    best = composed[0].max(-1)
    return replace(outcome, best=_bytes(best.indices), best_scores=_array(best.values))


def _drafted(
    sweep: Sweep, passage: Passage
) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]] | None:
    """The drafter's log-probabilities as they go on: the sum per draft for whole drafts, all 256
    per position for verification by sampling, none for greedy verification."""
    if passage.drafted is None or (sweep.mode == Mode.VERIFY and sweep.temperature == 0):
        return None
    drafted = passage.drafted
    if sweep.mode == Mode.ONE_SWEEP and drafted.dim() == 3:
        drafted = byte_scores(drafted, passage.drafts, sampling_of(sweep)).clamp_min(LOG_FLOOR)
        drafted = drafted.cpu().double().sum(-1)
    return _array(drafted)


def _array(tensor: Tensor | None) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]] | None:
    return None if tensor is None else tensor.detach().float().cpu().numpy()


def _bytes(tensor: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return tensor.to(torch.uint8).cpu().numpy()
