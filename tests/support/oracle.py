"""The oracle: transformers on every path alone, and random trees with every known trap.

The expected values use none of titan_tree's trees, attention or losses. A path is a list of tokens, a model
call is transformers' model on that list, and a loss is a sum in a loop.
"""

import copy
import random
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec

import torch
import transformers

from titan_tree.components.tree_loss.loss import TreeLoss
from titan_tree.models.settings import MODELS
from titan_tree.tree.batch import TreeBatch
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree

KINDS = ("random", "chain", "star", "forest")


def random_groups(seed, vocab_size=61, max_length=7, num_nodes=7):
    """Returns one list of TokenPaths per tree of a random forest.

    ``seed`` modulo 4 picks the kind: any shape, a chain with a path ending at every node, a star of many
    leaves, or several trees. Every forest has 1-token nodes, duplicate paths with different masks, paths that
    end inside the tree, a path with an empty loss mask, unequal weights with a 0 among them, and a path of
    one token.
    """
    r = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    return [
        _random_paths(r, kind, vocab_size, max_length, num_nodes) for _ in range(3 if kind == "forest" else 1)
    ]


def _random_paths(r, kind, vocab_size, max_length, num_nodes):
    prefixes = [[]]  # tokens from the root to the end of each node
    for node in range(2 * num_nodes if kind in ("chain", "star") else num_nodes):
        parent = {"chain": node, "star": min(node, 1)}.get(kind, r.randint(min(node, 1), node))
        length = r.choice([1, 1, 2, 3, r.randint(1, max_length)])
        prefixes.append(prefixes[parent] + [r.randrange(vocab_size) for _ in range(length)])
    token_lists = prefixes[1:]
    longest = max(token_lists, key=len)
    token_lists += [r.choice(token_lists), longest, longest[: r.randint(1, len(longest))], longest[:1]]
    r.shuffle(token_lists)
    paths = []
    for i, tokens in enumerate(token_lists):
        mask = [0.0 if i == 0 else float(r.random() < 0.7) for _ in tokens]
        paths.append(TokenPath(tokens, loss_mask=mask, weight=0.0 if i == 1 else r.uniform(0.2, 3)))
    return paths


def flat(groups):
    """Returns all paths of a forest."""
    return [path for paths in groups for path in paths]


def tree_batch(groups, device="cpu", edges="all", replay="off"):
    trees = [TokenTree.from_paths(paths, replay) for paths in groups]
    return TreeBatch.from_trees(trees, edges).to(device)


SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def hf_model(tied, dtype=torch.float32, device="cpu", seed=0, kind="Qwen3", **sizes):
    """Returns transformers' Qwen3 or Qwen3-MoE (``kind`` "Qwen3Moe"), small and random.

    Every parameter matters; for example, weights of norms differ from 1.
    """
    own = {"num_hidden_layers": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    experts = EXPERTS | {"norm_topk_prob": True} if kind == "Qwen3Moe" else {}
    return _random_model(kind, f"{kind}Config", own | experts | sizes, tied, seed).to(device, dtype)


def hybrid_model(tied, kind="Qwen3_5", dtype=torch.float32, device="cpu", num_layers=3, seed=0, **sizes):
    """Returns transformers' Qwen3.5, Qwen3.5-MoE ("Qwen3_5Moe") or Qwen3-Next with experts ("Qwen3Next").

    ``kind`` picks one of them. The model is small and random, and every parameter matters. The second of
    three layers has attention, and the others have DeltaNet.
    """
    assert find_spec("fla") is None, "uninstall flash-linear-attention, which transformers would use"
    own = {
        "num_hidden_layers": num_layers,
        "full_attention_interval": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 8,
        # DeltaNet's outputs may cancel to almost 0. With the published 1e-6, its norm magnifies their
        # rounding.
        "rms_norm_eps": 1e-3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    }
    experts = {} if kind == "Qwen3_5" else EXPERTS | {"shared_expert_intermediate_size": 20}
    config_class = f"{kind}Config" if kind == "Qwen3Next" else f"{kind}TextConfig"
    return _random_model(kind, config_class, own | experts | sizes, tied, seed).to(device, dtype)


def _random_model(kind, config_class, config, tied, seed):
    """Returns a model in fp32. Norms, biases, convolutions and decays differ from their neutral values."""
    config = getattr(transformers, config_class)(
        **(SIZES | config), tie_word_embeddings=tied, attn_implementation="eager"
    )
    torch.manual_seed(seed)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif name.endswith(("dt_bias", "conv1d.weight")):
                parameter.copy_(0.5 * torch.randn_like(parameter))
            elif name.endswith("A_log"):
                parameter.uniform_(0.05, 2.0).log_()
    return model


def tree_model(hf, attention="auto"):
    """Returns titan_tree's model with the weights, device and dtype of transformers' model ``hf``."""
    kind = hf.config.model_type
    model_class = next(MODELS[name] for name in MODELS if kind in MODELS[name].hf_architectures)
    config = model_class.Config.from_hf(hf.config.to_dict(), "test")
    model = model_class(config, attention).to(hf.device, hf.dtype)
    weights = {name.removeprefix("model."): tensor for name, tensor in hf.state_dict().items()}
    if hf.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    model.load_state_dict(weights)
    return model


def path_logprobs(hf, tokens):
    """Returns [len(tokens) - 1] fp32 log-probabilities of one path, run alone."""
    ids = torch.as_tensor(tokens, device=hf.device).long()
    logits = hf(input_ids=ids[None], use_cache=False).logits[0, :-1]
    return logits.float().log_softmax(-1).gather(1, ids[1:, None])[:, 0]


def path_coefficients(paths, reduction):
    """Returns [T - 1] for each path, the factors of -log p(tokens[t]) in the loss for t = 1, 2, ..."""
    masks = [torch.from_numpy(path.loss_mask[1:]).double() for path in paths]
    weights = [path.weight for path in paths]
    if reduction == "path_mean":
        return [w * mask / sum(weights) for w, mask in zip(weights, masks, strict=True)]
    if reduction == "token_mean":
        total = sum(w * mask.sum() for w, mask in zip(weights, masks, strict=True))
        return [w * mask / total for w, mask in zip(weights, masks, strict=True)]
    assert reduction == "path_token_mean"
    return [w * mask / max(mask.sum(), 1) / sum(weights) for w, mask in zip(weights, masks, strict=True)]


def once_weights(paths, reduction):
    """Returns the factors of all token losses of a tree's paths, without 1 / Z, and their sum, Z.

    An edge is a prefix of tokens here. The reduction is "distinct_token_mean" or "first_path_token_mean".
    """
    counted: dict[tuple[int, ...], list[float]] = {}  # prefix -> w m of the paths that count it, in order
    for path in paths:
        for t in range(1, len(path)):
            if path.weight * path.loss_mask[t]:
                counted.setdefault(tuple(path.tokens[: t + 1]), []).append(path.weight * path.loss_mask[t])
    seen, weights = set(), []
    for path in paths:
        weights.append([])
        for t in range(1, len(path)):
            prefix, weight = tuple(path.tokens[: t + 1]), path.weight * float(path.loss_mask[t])
            if reduction == "distinct_token_mean":
                weight /= sum(counted.get(prefix, [1]))
            elif prefix in seen:
                weight = 0.0
            elif weight:
                seen.add(prefix)
            weights[-1].append(weight)
    total = len(counted) if reduction == "distinct_token_mean" else sum(w for w, *_ in counted.values())
    return weights, total


@contextmanager
def routed_to(hf, experts):
    """Within the context, routers use ``experts`` [T, layers, k] for T tokens, and choose freely at -1."""
    routers = [module for module in hf.modules() if type(module).__name__.endswith("TopKRouter")]
    assert len(routers) == experts.shape[1]

    def forced(router, own):
        def forward(hidden):
            logits = hidden.flatten(0, -2) @ router.weight.t()
            probability = logits.float().softmax(-1)
            preferred = probability.topk(router.top_k).indices
            chosen = torch.where(own >= 0, own, preferred)
            weight = probability.gather(1, chosen)
            if getattr(router, "norm_topk_prob", True):
                weight = weight / weight.sum(-1, keepdim=True)
            return logits, weight.to(logits.dtype), chosen

        return forward

    for i, router in enumerate(routers):
        router.forward = forced(router, torch.as_tensor(experts[:, i]).long().to(hf.device))
    yield
    for router in routers:
        del router.forward


def per_path(hf, paths, reduction="path_mean", experts=None):
    """Returns (log-probabilities of each path, SFT loss, gradients by parameter name), one path at a time.

    Gradients are summed over paths in fp32. ``experts`` are those that ``routed_to`` forces on each path.
    """
    gradients = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in hf.named_parameters()}
    logprobs, loss = [], 0.0
    for i, (path, coefficients) in enumerate(zip(paths, path_coefficients(paths, reduction), strict=True)):
        with nullcontext() if experts is None else routed_to(hf, experts[i]):
            logprobs.append(path_logprobs(hf, path.tokens))
        path_loss = -(coefficients.float().to(hf.device) * logprobs[-1]).sum()
        hf.zero_grad(set_to_none=True)
        path_loss.backward()
        for name, parameter in hf.named_parameters():
            gradients[name] += parameter.grad
        loss += path_loss.item()
    gradients = {name.removeprefix("model."): gradient for name, gradient in gradients.items()}
    return [x.detach() for x in logprobs], loss, gradients


def in_one_pass(model, groups, edges="all", reduction="path_mean", replay="off"):
    """Returns the same as ``per_path``, from one pass of titan_tree's model over the forest."""
    batch = tree_batch(groups, model.embedding_weight.device, edges, replay)
    tree_loss = TreeLoss("sft", reduction)
    model.zero_grad(set_to_none=True)
    logprobs = model(batch).logprobs
    loss, _ = tree_loss(logprobs, batch, tree_loss.normalizer(path for group in groups for path in group))
    loss.backward()
    pairs = batch.pairs
    counts = torch.bincount(pairs.path, minlength=len(pairs.weight)).tolist()
    per_pair = logprobs.detach()[pairs.edge].split(counts)
    return (
        list(per_pair),
        loss.item(),
        {name: p.grad for name, p in model.named_parameters() if p.requires_grad},
    )


def relative_error(got, want):
    """Returns ||got - want|| / ||want||, or 0 if both are 0."""
    error, norm = (got.double() - want.double()).norm().item(), want.double().norm().item()
    return error / norm if norm else error


class NoiseFloor:
    """The errors of transformers' model in bf16, ``noisy``, which runs every path of some forests alone.

    The reference is ``exact``, the same numbers in fp32. Several backends are compared with one noise floor.
    """

    def __init__(self, noisy, forests):
        self.noisy, self.exact, self.forests = noisy, copy.deepcopy(noisy).float(), forests
        self._want = [per_path(self.exact, flat(groups))[2] for groups in forests]
        self._floor = self._squared_errors(lambda groups: per_path(noisy, flat(groups))[2])

    def ratios(self, gradients):
        """Returns a ratio for each parameter: the error of ``gradients(groups)`` over the error of ``noisy``.

        The errors are summed over forests as squared norms, so that no single draw decides.
        """
        mine = self._squared_errors(gradients)
        return {name: (error / self._floor[name]) ** 0.5 for name, error in mine.items()}

    def _squared_errors(self, gradients):
        errors = dict.fromkeys(self._want[0], 0.0)
        for groups, want in zip(self.forests, self._want, strict=True):
            got = gradients(groups)
            for name, gradient in want.items():
                errors[name] += relative_error(got[name], gradient) ** 2
        return errors


def assert_same(got, want, tolerance=1e-5):
    """Asserts that ``in_one_pass`` gave what ``per_path`` did, relative to the norm of each tensor."""
    assert len(got[0]) == len(want[0])
    for i, (mine, theirs) in enumerate(zip(got[0], want[0], strict=True)):
        assert mine.shape == theirs.shape
        assert relative_error(mine, theirs) <= tolerance, f"log-probs of path {i}"
    assert abs(got[1] - want[1]) <= tolerance * abs(want[1]), "loss"
    assert got[2].keys() == want[2].keys()
    for name, gradient in want[2].items():
        assert relative_error(got[2][name], gradient) <= tolerance, name
