"""A trace of verifiers, a rollout of NeMo Gym and one of Agent Lightning, each with a compaction."""


def node(parent, tokens, logprobs=(), role="user", **fields):
    """Returns a node; its last tokens are sampled, one per log-prob."""
    sampled = len(logprobs)
    mask = [False] * (len(tokens) - sampled) + [True] * sampled
    return {
        "parent": parent,
        "message": {"role": role, "content": "..."},
        "sampled": bool(sampled),
        "token_ids": tokens,
        "mask": mask,
        "logprobs": list(logprobs),
        **fields,
    }


def link(node, type):
    return {"semantic_parents": [{"node": node, "type": type}]}


# system 0 - user 1 - turn 2 - tool 3 - turn 4            the main conversation
#              |        `- compaction attempt 5           not resumed from: no sample
#              |        `- compaction attempt 6           resumed from by 8
#              `- summary 7 - turn 8                      after the compaction
# sub-agent 9 - turn 10
TRACE = {
    "version": 1,
    "id": "t1",
    "task": {"type": "Search", "data": {"question": "?"}, "key": "search-1"},
    "agent": {"name": "agent", "trainable": True},
    "nodes": [
        node(None, [1, 2], role="system", is_content=[False, True]),
        node(0, [3], timestamp=1.5),
        node(1, [4, 5, 6], [-0.5, -0.25], "assistant", advantages=[1.0, 2.0]),
        node(2, [7, 8]),
        node(3, [9], [-0.125], "assistant", advantages=[3.0]),
        node(2, [10, 11], [-0.75], "assistant", **link(4, "compaction_attempt")),
        node(2, [10, 12], [-1.0], "assistant", advantages=[4.0], **link(4, "compaction_attempt")),
        node(1, [13]),
        node(7, [14], [-1.5], "assistant", advantages=[5.0], **link(6, "compaction")),
        node(None, [20, 21]),
        node(9, [22], [-2.0], "assistant", advantages=[6.0]),
    ],
    "calls": [{"node": n, "sampling": {"temperature": 0.5}} for n in (2, 4, 5, 6, 8, 10)],
    "rewards": {"correct": {"score": 1.0, "weight": 0.5}, "format": {"score": 0.25}, "judge": None},
    "metrics": {"num_turns": 5.0},
    "ok": True,
    "is_timeout": False,
    "errors": [{"type": "Timeout", "message": "of an earlier attempt"}],
    "info": {"step": 3},
    "num_input_tokens": 9,
    "num_output_tokens": 8,
    "num_total_tokens": 17,
}


def episode(*traces, **fields):
    """Returns an episode, as verifiers writes it to traces.jsonl and prime-rl to traces/stream."""
    return {
        "id": "e1",
        "env": {"id": "search", "name": "search"},
        "task": TRACE["task"],
        "group": {"id": "g1"},
        "run": {"type": "train", "id": "r", "work": {"type": "train", "step": 3}},
        "ok": True,
        "is_timeout": False,
        "errors": [],
        "traces": list(traces),
        "num_total_tokens": 17,
        **fields,
    }


def call(prompt, ids, logprobs, **fields):
    return {
        "type": "message",
        "prompt_token_ids": prompt,
        "generation_token_ids": ids,
        "generation_log_probs": logprobs,
        **fields,
    }


GYM = {
    "_ng_task_index": 0,
    "_ng_rollout_index": 1,
    "agent_ref": {"name": "simple_agent"},
    "responses_create_params": {"input": [{"role": "user", "content": "?"}], "temperature": 0.5},
    "response": {
        "output": [
            call([1, 2], [3, 4], [-0.5, -0.25]),
            {"type": "function_call_output", "call_id": "c", "output": "..."},
            call([1, 2, 3, 4, 5], [6], [-0.125]),
            call([1, 7], [8], [-1.0]),  # after a compaction
        ]
    },
    "reward": 0.75,
}


def triplet(prompt, ids, **response):
    return {
        "prompt": {"token_ids": prompt, "image_urls": []},
        "response": {"token_ids": ids, **response},
        "reward": None,
        "metadata": {"response_id": "chatcmpl-1", "agent_name": "agent"},
    }


LIGHTNING = {
    "rollout_id": "rollout-1",
    "task": {"rollout_id": "rollout-1", "input": {"question": "?"}, "mode": "train"},
    "final_reward": 0.75,
    "triplets": [
        triplet([1, 2], [3, 4], logprobs=[{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -0.25}]),
        triplet([1, 2, 3, 4, 5], [6], logprobs=[-0.125]),
        triplet([1, 7], [8], logprobs=[-1.0]),  # after a compaction
    ],
    "trace": None,
    "logs": None,
    "metadata": {},
}
