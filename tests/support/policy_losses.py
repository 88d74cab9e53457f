"""Policy losses of one path by their formulas, as an independent reference for titan_tree's.

Every function takes 1-d tensors of the tokens of one path: log-probs ``n``, old ``o``, reference ``f`` and
rollout ``b`` log-probs, advantages ``A`` and the loss mask ``m``. It returns the losses of the tokens.
"""

import math

import torch

CLIP = {"clip_low": 0.1, "clip_high": 0.3}


def ppo(n, o, A, low=0.2, high=0.2, dual=None):
    r = (n - o).exp()
    out = []
    for ratio, a in zip(r, A, strict=True):
        loss = torch.maximum(-ratio * a, -ratio.clamp(1 - low, 1 + high) * a)
        if dual is not None and a < 0:
            loss = torch.minimum(loss, -dual * a)
        out.append(loss)
    return torch.stack(out)


def sequence_ratio(n, o, m):
    return ((m * (n - o)).sum() / m.sum()).exp() if m.sum() else torch.ones((), dtype=n.dtype)


def gspo(n, o, A, m, low=3e-4, high=4e-4):
    s = sequence_ratio(n, o, m)
    return torch.maximum(-s * A, -s.clamp(1 - low, 1 + high) * A)


def gspo_token(n, o, A, m, low=3e-4, high=4e-4):
    s = sequence_ratio(n, o, m).detach() * (n - n.detach()).exp()
    return torch.maximum(-s * A, -s.clamp(1 - low, 1 + high) * A)


def gmpo(n, o, A, m, low=0.4, high=0.4):
    if not m.sum():
        return 0 * n
    x, sign = n - o, A.sign()
    y = torch.where(A > 0, x.clamp(max=high), torch.where(A < 0, x.clamp(min=-low), 0 * x))
    assert sign.shape == y.shape
    mean = (m * y).sum() / m.sum()
    return (-(m * A).sum() / m.sum() * mean.exp()).expand_as(n)


def cispo(n, o, A, low, high):
    return -(n - o).exp().clamp(low, high).detach() * A * n


def sapo(n, o, A, positive=1.0, negative=1.05):
    tau = torch.tensor([positive if a > 0 else negative for a in A], dtype=n.dtype)
    return -A * 4 / tau / (1 + (-tau * ((n - o).exp() - 1)).exp())


def vespo(n, o, b, A, m):
    w = (m * (n - b)).sum().detach().clamp(math.log(1e-8), 20).exp()
    phi = [w**2 * math.exp(3) * (-3 * w).exp() if a >= 0 else w**3 * math.exp(2) * (-2 * w).exp() for a in A]
    return -torch.stack(phi) * A * n


def dppo(n, o, A, kind, limit):
    out = []
    for new, old, a in zip(n, o, A, strict=True):
        p, q = new.detach().exp(), old.exp()
        distance = (p - q).abs()
        if kind == "kl":
            distance = q * (old - new.detach()) + (1 - q) * ((1 - q + 1e-8) / (1 - p + 1e-8)).log()
        away = p > q if a > 0 else p < q
        keep = 0.0 if away and distance > limit else 1.0
        out.append(-keep * (new.detach() - old).exp().clamp(max=20) * a * new)
    return torch.stack(out)


def decoupled(n, o, b, A, limit=5.0):
    w = (o - b).exp()
    return torch.where(w > limit, 0.0, w) * ppo(n, o, A)


# name -> (options of TreeLoss, reduction, reference)
LOSSES = {
    "reinforce": ({}, "path_mean", lambda n, o, f, b, A, m: -A * n),
    "ppo": (CLIP, "token_mean", lambda n, o, f, b, A, m: ppo(n, o, A, 0.1, 0.3)),
    "ppo, dual clip": (
        {"dual_clip": 1.4},
        "token_mean",
        lambda n, o, f, b, A, m: ppo(n, o, A, dual=1.4),
    ),
    "grpo": ({}, "path_token_mean", lambda n, o, f, b, A, m: ppo(n, o, A)),
    "dr_grpo": ({}, "path_mean", lambda n, o, f, b, A, m: ppo(n, o, A)),
    "dapo": ({}, "token_mean", lambda n, o, f, b, A, m: ppo(n, o, A, 0.2, 0.28)),
    "cispo": ({}, "token_mean", lambda n, o, f, b, A, m: cispo(n, o, A, 0, 5)),
    "cispo, clip range": (CLIP, "token_mean", lambda n, o, f, b, A, m: cispo(n, o, A, 0.9, 1.3)),
    "cispo, max_ratio": ({"max_ratio": 1.2}, "token_mean", lambda n, o, f, b, A, m: cispo(n, o, A, 0, 1.2)),
    "sapo": ({}, "path_token_mean", lambda n, o, f, b, A, m: sapo(n, o, A)),
    "dppo_tv": ({}, "token_mean", lambda n, o, f, b, A, m: dppo(n, o, A, "tv", 0.15)),
    "dppo_kl": ({}, "token_mean", lambda n, o, f, b, A, m: dppo(n, o, A, "kl", 0.05)),
    "decoupled_ppo": ({}, "token_mean", lambda n, o, f, b, A, m: decoupled(n, o, b, A)),
    "decoupled_ppo, max_weight": (
        {"max_weight": 1.1},
        "token_mean",
        lambda n, o, f, b, A, m: decoupled(n, o, b, A, 1.1),
    ),
    "distill": ({}, "token_mean", lambda n, o, f, b, A, m: -(f - n).detach() * n),
    "gspo": (CLIP, "path_token_mean", lambda n, o, f, b, A, m: gspo(n, o, A, m, 0.1, 0.3)),
    "gspo_token": (CLIP, "path_token_mean", lambda n, o, f, b, A, m: gspo_token(n, o, A, m, 0.1, 0.3)),
    "luspo": ({}, "path_mean", lambda n, o, f, b, A, m: gspo(n, o, A, m)),
    "gmpo": ({}, "path_token_mean", lambda n, o, f, b, A, m: gmpo(n, o, A, m)),
    "vespo": ({}, "token_mean", lambda n, o, f, b, A, m: vespo(n, o, b, A, m)),
}


def reduced(losses, masks, weights, reduction):
    """Returns the loss of a batch from the token losses of its paths."""
    total, z = 0.0, 0.0
    for loss, m, w in zip(losses, masks, weights, strict=True):
        if m.sum():
            total = total + w * (m * loss).sum() / (m.sum() if reduction == "path_token_mean" else 1)
        z += w * float(m.sum()) if reduction == "token_mean" else w
    return total / z
