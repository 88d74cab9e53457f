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


def entry(call_id, prompt, ids, logprobs, rollout="3-1", **fields):
    """Returns a call that NeMo Gym captured, with the members that its store writes in this order."""
    return {
        "continuation_context_digest": "d",
        "continuation_context_len": 1,
        "continuation_fingerprint": "f",
        "created_at": 1.5,
        "cum_len": len(prompt + ids),
        "digest": "d",
        "fingerprint_version": 1,
        "generation_log_probs": logprobs,
        "generation_token_ids": ids,
        "model": "m",
        "model_call_id": call_id,
        "output_items": [{"type": "message", "role": "assistant", "content": "..."}],
        "parent_call_id": None,
        "parent_resolution": "root",
        "parent_resolution_reason": "",
        "prompt_token_ids": prompt,
        "response_id": "resp-1",
        "rollout_id": rollout,
        "routed_experts": None,
        "schema_version": 3,
        "token_item_index": 0,
        **fields,
    }


# Of 4 tokens, 1 layer and 2 experts, as NeMo-RL's codec writes them: [0, 1], [1, 2], [2, 3], [-1, -1].
ENVELOPE = "nrlre1:int16:4x1x2:AAABAAEAAgACAAMA/////w=="
GYM_CALLS = [
    entry("a", [1, 2], [3, 4], [-0.5, -0.25], routed_experts=ENVELOPE),
    entry("b", [1, 2, 3, 4, 5], [6], [-0.125], parent_call_id="a", parent_resolution="resolved"),
    entry("c", [1, 7], [8], [-1.0], parent_resolution="unresolved"),  # after a compaction
]


def gateway_trace(rollout, reward, tokens, mask, logprobs, truncated=False):
    """Returns a TraceRecord of agentcore-rl-toolkit; its TrajectoryManager made those of EPISODES."""
    return {
        "token_ids": tokens,
        "loss_mask": mask,
        "logprobs": logprobs,
        "rollout_id": rollout,
        "reward": reward,
        "response_length": len(mask),
        "response": "",
        "metadata": {"truncated": truncated, "use_tool": False, "ill_formed": False},
        "status": "completed",
    }


def gateway_episode(rollout, reward):
    records = [
        gateway_trace(rollout, reward, [1, 2, 3, 4, 5, 6], [1, 1, 0, 1], [-0.5, -0.25, 0.0, -0.125], True),
        gateway_trace(rollout, reward, [1, 2, 3, 4, 9, 10], [0, 0, 0, 1], [0.0, 0.0, 0.0, -0.75]),
        gateway_trace(rollout, reward, [1, 7, 8], [1], [-1.0]),
    ]
    return {"rollout_id": rollout, "reward": reward, "records": records, "error": None}


EPISODES = [  # as train.py of its Tinker backend writes groups
    [gateway_episode("r1", 0.75), gateway_episode("r2", 0.25)],
    [{"rollout_id": "r3", "reward": None, "records": [], "error": "TimeoutError: "}],
]


def branch(path, tokens, mask, logprobs, trajectory="tr_1", experts=None, reward=0.75):
    """Returns a row of token_samples that skyrl-capture exports."""
    return {
        "schema_version": 1,
        "path_id": f"{trajectory}-p000{path}",
        "trajectory_id": trajectory,
        "node_ids": ["n0", "n1"],
        "abandoned": False,
        "labels": {},
        "annotations": {"reward": reward},
        "model": "m",
        "tools": None,
        "trainable_count": sum(mask),
        "input_ids": tokens,
        "node_spans": [[0, 2], [2, len(tokens)]],
        "loss_mask": mask,
        "rollout_logprobs": logprobs,
        "rollout_expert_indices": experts,
        "stop_reason": "stop",
        "tokenizer": "t",
    }


BRANCHES = [
    branch(
        0,
        [1, 2, 3, 4, 5, 6],
        [0, 0, 1, 1, 0, 1],
        [0.0, 0.0, -0.5, -0.25, 0.0, -0.125],
        experts=[[[0, 1]]] * 6,
    ),
    branch(1, [1, 2, 3, 4, 9, 10], [0, 0, 0, 0, 0, 1], [0.0, 0.0, -0.5, -0.25, 0.0, -0.75]),
    branch(2, [1, 2, 3, 4, 9], [0] * 5, [0.0, 0.0, -0.5, -0.25, 0.0]) | {"masked_reason": "repeated_target"},
]

# TrialResult of Harbor, which its Chat filled, wrote this with a longer config and null members.
TRIAL = {
    "schema_version": 1,
    "id": "2f0c4a3e-0000-4000-8000-000000000001",
    "task_name": "hello",
    "trial_name": "hello__abc",
    "trial_uri": "file:///t",
    "task_id": {"path": "/t/hello"},
    "source": None,
    "task_checksum": "c0ffee",
    "config": {"agent": {"name": "terminus-2", "kwargs": {"temperature": 0.5}}},
    "agent_info": {"name": "terminus-2", "version": "2", "model_info": None},
    "agent_result": {
        "n_input_tokens": 9,
        "rollout_details": [
            {
                "prompt_token_ids": [[1, 2], [1, 2, 3, 4, 5]],
                "completion_token_ids": [[3, 4], [6]],
                "logprobs": [[-0.5, -0.25], [-0.125]],
                "extra": {"routed_experts": [[[[0, 1]], [[1, 2]], [[2, 3]]], None]},
            },
            {"prompt_token_ids": [[1, 7]], "completion_token_ids": [[8]], "logprobs": [[-1.0]]},
        ],
    },
    "verifier_result": {"rewards": {"reward": 0.75}},
    "exception_info": None,
    "step_results": None,
    "reward_valid": True,
}
