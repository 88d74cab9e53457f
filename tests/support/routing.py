"""Expected routing and router losses, computed by transformers on every path alone."""

import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from tests.support.oracle import flat, path_coefficients, tree_batch
from titan_tree.components.moe.layer import MoE
from titan_tree.tree.token_tree import TokenTree

BALANCE, Z = 0.3, 0.05  # coefficients of the router losses


def chosen_experts(model, groups):
    """Returns [N, layers, k], the experts of each token of the tree in ascending order."""
    seen = []
    mixtures = [module for module in model.modules() if isinstance(module, MoE)]

    def record(moe, arguments):
        seen.append((arguments[0] @ moe.gate.weight.t()).topk(moe.top_k).indices.sort().values)

    hooks = [moe.register_forward_pre_hook(record) for moe in mixtures]
    with torch.no_grad():
        model(tree_batch(groups))
    for hook in hooks:
        hook.remove()
    return torch.stack(seen, dim=1)


def assert_experts_of_paths(model, hf, groups):
    """Asserts that each token gets the experts that transformers chooses on each of its paths."""
    first, experts = 0, chosen_experts(model, groups)
    for paths in groups:
        tree = TokenTree.from_paths(paths)
        for i, path in enumerate(paths):
            tokens = torch.tensor([path.tokens.tolist()])
            with torch.no_grad():
                logits = hf(tokens, output_router_logits=True).router_logits
            chosen = [x.topk(hf.config.num_experts_per_tok).indices.sort().values for x in logits]
            assert torch.equal(experts[first + tree.indices_of(i)], torch.stack(chosen, dim=1))
        first += len(tree)


def batch_of_paths(hf, micro_batches, scope):
    """Returns (loss, gradients, balance, z) by definition, computed by transformers on every path alone.

    The router losses are those of all tokens of a balancing scope together.
    """
    paths = [path for groups in micro_batches for path in flat(groups)]
    coefficients = iter(path_coefficients(paths, "path_mean"))
    total, balance, per_token = 0.0, [], []
    logits_of_scopes = []
    for groups in micro_batches:
        logits = []
        for path in flat(groups):
            tokens = torch.as_tensor(path.tokens).long()
            out = hf(tokens[None], output_router_logits=True)
            logprobs = out.logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
            total = total - (next(coefficients).float() * logprobs).sum()
            logits.append(out.router_logits)
        logits_of_scopes.append(tuple(map(torch.cat, zip(*logits, strict=True))))
    if scope == "global_batch":
        logits_of_scopes = [tuple(map(torch.cat, zip(*logits_of_scopes, strict=True)))]
    num_tokens = [len(logits[0]) for logits in logits_of_scopes]
    k = hf.config.num_experts_per_tok
    for logits in logits_of_scopes:
        share = len(logits[0]) / sum(num_tokens)
        balance.append(share * load_balancing_loss_func(logits, hf.config.num_experts, k))
        per_token.append(torch.cat(logits).logsumexp(-1).square())
    z = torch.cat(per_token).mean()
    loss = total + BALANCE * sum(balance) + Z * z
    hf.zero_grad(set_to_none=True)
    loss.backward()
    gradients = {name.removeprefix("model."): p.grad for name, p in hf.named_parameters()}
    return loss.item(), gradients, sum(balance).item(), z.item()
