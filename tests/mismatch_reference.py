"""Mismatch metrics by their definition, one token at a time."""

import math
import sys

import torch

from safe_trainers.rollout.mismatch import EPS, LIMIT, POSITIONS, Limits


LARGEST = sys.float_info.max


def reference(rows, dtype="float32", limits=None):
    """Every metric by its definition, one token at a time; `rows` holds (trainer, sampler, counts) for each sequence.

    `counts` says of each token whether it is part of the completion. Positions are those in the row.
    """
    tokens, scored, sequences, positions, outside = 0, [], [], {}, 0
    for trainer, sampler, counts in rows:
        differences, weighed = [], []
        for place, (p, q, counted) in enumerate(zip(trainer, sampler, counts, strict=True)):
            if not counted:
                continue
            tokens += 1
            # TRL's `nan_to_num`: what is infinite is the largest number, so that two of them can cancel.
            weighed.append(0.0 if math.isnan(p - q) else max(min(p - q, LARGEST), -LARGEST))
            if math.isfinite(p) and math.isfinite(q):
                d = max(min(p - q, LIMIT), -LIMIT)
                differences.append(d)
                scored.append((d, q))
                bucket = max(first for first in POSITIONS if first <= place)
                positions.setdefault(bucket, []).append(abs(d))
        if differences:
            sequences.append(math.fsum(differences))
        if limits is not None:
            ratios = [sum(weighed)] * len(weighed) if limits.sequences else weighed
            low, high = limits.low or 0.0, math.inf if limits.high is None else limits.high
            outside += sum(not low <= math.exp(min(ratio, 700.0)) <= high for ratio in ratios)
    if not tokens:
        return {}
    found = {"unscored_frac": 1 - len(scored) / tokens}
    if scored:
        n, weights = len(sequences), [math.exp(max(min(s, LIMIT), -LIMIT)) for s in sequences]
        mean = math.fsum(sequences) / n
        found |= {
            "logp_mismatch_mean": math.fsum(abs(d) for d, _ in scored) / len(scored),
            "logp_mismatch_max": max(abs(d) for d, _ in scored),
            "logp_mismatch_k1": math.fsum(-d for d, _ in scored) / len(scored),
            "logp_mismatch_k3": math.fsum(math.expm1(d) - d for d, _ in scored) / len(scored),
            "logp_mismatch_ulp": math.fsum(abs(d) / (EPS[dtype] * max(1.0, abs(q))) for d, q in scored) / len(scored),
            "seq_logratio_abs_mean": math.fsum(map(abs, sequences)) / n,
            "seq_logratio_std": math.sqrt(math.fsum((s - mean) ** 2 for s in sequences) / n),
            "seq_ess": math.fsum(weights) ** 2 / (n * math.fsum(w * w for w in weights)),
        }
        for first, sizes in positions.items():
            following = [later - 1 for later in POSITIONS if later > first]
            found[f"mismatch_pos_{first}_{following[0] if following else 'up'}"] = math.fsum(sizes) / len(sizes)
    if limits is not None:
        found["is_masked_frac"] = outside / tokens
        if limits.clip is not None and scored:
            low, high = limits.clip
            found["phantom_clip_frac"] = sum(not low <= math.exp(d) <= high for d, _ in scored) / len(scored)
    return {f"precision/{name}": value for name, value in found.items()}


def batch(rows, width, scale=0.1, seed=0, unscored=0.0):
    """Log-probabilities as trainer and sampler give them, with padding, results of tools and tokens without any."""
    generator = torch.Generator().manual_seed(seed)
    sampler = -torch.rand(rows, width, generator=generator) * 5
    trainer = (sampler.double() + scale * torch.randn(rows, width, generator=generator)).float()
    lengths = torch.randint(0, width + 1, (rows, 1), generator=generator)
    mask = (torch.arange(width) < lengths).long() * (torch.rand(rows, width, generator=generator) > 0.2)
    gone = torch.rand(rows, width, generator=generator) < unscored
    sampler[gone] = torch.tensor([math.nan, -math.inf])[torch.randint(0, 2, (int(gone.sum()),), generator=generator)]
    return trainer, sampler, mask


def as_rows(trainer, sampler, mask):
    return list(zip(trainer.double().tolist(), sampler.double().tolist(), mask.tolist(), strict=True))


def loss_reference(rows, moved):
    """The metrics of a loss; `rows` holds (now, trainer, sampler, counts) for each sequence."""
    changes, gaps = [], []
    for now, trainer, sampler, counts in rows:
        for current, old, sampled, counted in zip(now, trainer, sampler, counts, strict=True):
            if counted and math.isfinite(current - old):
                changes.append(abs(current - old))
                if math.isfinite(old - sampled):
                    gaps.append(abs(old - sampled))
    sizes = {"logratio_policy": changes, "logratio_gap": gaps} if moved else {"logp_batch_noise": changes}
    return {f"precision/{name}": math.fsum(found) / len(found) for name, found in sizes.items() if found}


LIMITS = [
    None,
    Limits(None, 3.0, True),
    Limits(0.9, 1.05, False, (0.8, 1.28)),
    Limits(0.95, None, False),
    Limits(None, None, True),
]
