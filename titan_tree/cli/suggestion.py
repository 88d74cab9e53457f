"""The configuration that titan-tree config writes: what the data, the model and the machine suggest."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from titan_tree.cli.data_arguments import DataTables, key_of, named_model, progress_bar, with_arguments
from titan_tree.cli.reference import tables
from titan_tree.config.toml import load_tables
from titan_tree.data.data_files import DataFiles, Group, group_trajectories, holds_conversations
from titan_tree.data.readers import Record
from titan_tree.data.schema import ADVICE, BOOKKEEPING, KNOWN, MESSAGE_FIELDS, is_text, present_fields
from titan_tree.data.settings import DataConfig
from titan_tree.data.token_store import STORED
from titan_tree.errors import UserError, did_you_mean
from titan_tree.run.build import build_loss, build_reader, build_tokenizer
from titan_tree.run.config import Config

LOOK_AT = 64  # groups of the data that are rendered, as training does
MIN_STEPS = 8  # of a run
USES = {  # fields that a run may use -> what uses them
    "reward": "the loss compares preferences",
    "advantage": "a loss of reinforcement learning needs one on all, and data.advantage=given",
    "old_logprobs": "losses such as grpo need them and advantages on all",
    "rollout_logprobs": "loss.correction uses them",
    "ref_logprobs": "loss.kl uses them, and losses of preferences",
    "routed_experts": "data.replay uses them",
}
READS = {"grpo": "old_logprobs", "dpo": "ref_logprobs", "kto": "ref_logprobs"}  # losses -> what they read


class Survey:
    """What the records of data files have.

    Attributes:
        groups: how many groups there are; first: the first ``LOOK_AT`` of them.
        trajectories: how many there are.
        fields: how many trajectories have each field; unknown: the same of fields that nothing reads.
        marks: the preferences that occur.
    """

    def __init__(self, data: DataConfig, message_fields: Set[str]) -> None:
        self.groups = self.trajectories = 0
        self.first: list[Group] = []
        self.fields, self.unknown = Counter[str](), Counter[str]()
        self.marks: set[str] = set()
        with progress_bar() as open_file:
            for group in DataFiles(data).groups(open_file):
                self.groups += 1
                self.first += [group] * (len(self.first) < LOOK_AT)
                records = [trajectory.record for trajectory in group_trajectories(group)]
                self.trajectories += len(records)
                for record in records:
                    self.fields.update(present_fields(record, record).keys())
                    self.marks |= {record["preference"]} if record.get("preference") else set()
                tasks = [record for _, record in group.records if record.get("trajectories") is not None]
                for record in (*tasks, *records) if "*" not in data.ignore_fields else ():
                    self.unknown.update(_unknown(record, message_fields) - set(data.ignore_fields))

    def all_have(self, *fields: str) -> bool:
        """Returns whether every trajectory has one of the fields, of which no trajectory has two."""
        return sum(self.fields[field] for field in fields) == self.trajectories

    @property
    def has_rewards(self) -> bool:
        """Whether advantages can be computed from the rewards of each group."""
        return self.all_have("reward") and self.trajectories > self.groups and not self.marks

    @property
    def is_rl(self) -> bool:
        """Whether the data have advantages, or can have them."""
        return self.has_rewards or self.all_have("advantage")

    @property
    def loss(self) -> str:
        """The name of a loss that the data have the fields for."""
        if self.marks:  # sft would train rejected answers, too
            return "dpo" if self.marks <= {"chosen", "rejected"} else "kto"
        if not self.is_rl:
            return "sft"
        return "grpo" if self.all_have("old_logprobs", "shifted_old_logprobs") else "reinforce"

    def notes(self, advantage: str) -> Iterator[str]:
        """Yields a sentence about ignored fields, and about each field that could be trained with.

        Args:
            advantage: ``data.advantage`` of the configuration.
        """
        known = KNOWN["a conversation"] | KNOWN["token ids"]
        names = [f"{name} ({n:,}{did_you_mean(name, known)})" for name, n in sorted(self.unknown.items())]
        if names:
            yield f"fields that are ignored: {', '.join(names)}"
        used = {READS.get(self.loss), "reward" if advantage != "given" else self.is_rl and "advantage"}
        for field, reason in USES.items():
            number = self.fields[field] + self.fields[f"shifted_{field}"]
            if number and field not in used:
                if field == "reward" and not self.marks:
                    reason = (
                        "each is alone in its group: give tries of the same task one group_id"
                        if self.all_have("reward")
                        else "advantages need the rewards of all"
                    )
                yield f"{field}: on {number:,} of {self.trajectories:,} trajectories, not used; {reason}"


def _unknown(record: Record, message_fields: Set[str]) -> set[str]:
    """Returns the fields of a task or trajectory, and of its messages, that nothing reads."""
    kind = "token ids"
    if record.get("trajectories") is not None:
        kind = "a task"
    elif is_text(record):
        kind = "a text"
    elif record.get("messages") is not None:
        kind = "a conversation"
    fields = present_fields(record, record).keys() - KNOWN[kind] - {STORED}
    messages = record.get("messages")
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict):
            fields |= present_fields(message, message).keys() - message_fields
    return fields - BOOKKEEPING - ADVICE.keys()


def settings(
    model: str, files: list[str], name: str, overrides: Sequence[str] = ()
) -> tuple[dict[str, Any], list[str], bool]:
    """Returns keys and values of a configuration that trains ``model`` on ``files``.

    The second value is what the configuration ignores or does not use, as sentences, and the third says
    whether the loss needs ref_logprobs that the files lack.

    Args:
        overrides: keys that the user chooses, as key=value.

    Raises:
        UserError: the model or the data cannot be read, or cannot be trained.
    """
    network = named_model(model)  # raises UserError for a wrong one
    chosen = set(map(key_of, overrides))
    of_data = [word for word in overrides if key_of(word).startswith("data.")]
    data = load_tables(DataTables, os.devnull, with_arguments({"data.files": files}, of_data)).data
    tokenizer = build_tokenizer(data, model if Path(model).is_dir() else None)
    survey = Survey(data, MESSAGE_FIELDS | (tokenizer.template_fields if tokenizer else frozenset()))
    if survey.marks and not survey.all_have("preference"):
        raise UserError(
            f"{', '.join(files)}: preference: on {survey.fields['preference']:,} of {survey.trajectories:,} "
            "trajectories; expected it on all or on none; write the others to a file of their own"
        )
    values = {"folder": f"outputs/{name}", **_suggested(model, files, data, survey, chosen)}
    for own, other in (("loss.name", "loss.reduction"), ("training.steps", "training.epochs")):
        if own in chosen:  # the other one may not go together with it
            del values[other]
    values = {key: value for key, value in values.items() if key not in chosen - {"data.ignore_fields"}}
    config = load_tables(Config, os.devnull, [*overrides, *values.items()])
    for key in _declared(chosen):
        values[key] = attrgetter(key)(config)
    build_loss(config.loss)
    tokenizer = build_tokenizer(config.data, config.model.hf_path)
    reader = build_reader(config.data, tokenizer, network, config.loss)
    for group in survey.first:
        reader.paths(group)
    is_unscored = bool(survey.marks) and not survey.all_have("ref_logprobs", "shifted_ref_logprobs")
    return values, list(survey.notes(config.data.advantage)), is_unscored


def _suggested(
    model: str, files: list[str], data: DataConfig, survey: Survey, chosen: Set[str]
) -> dict[str, Any]:
    """Returns keys and values that suit the model, the data and this machine."""
    is_folder, on_gpu = Path(model).is_dir(), torch.cuda.is_available()
    name, _, flavor = model.partition(":")
    family = {"model.name": name, "model.flavor": flavor}
    values: dict[str, Any] = {"model.hf_path": model} if is_folder else family
    if not is_folder and any(map(holds_conversations, survey.first)):
        values["data.tokenizer"] = "byte"
    if survey.has_rewards:
        values["data.advantage"] = "group"
    if survey.unknown:
        values["data.ignore_fields"] = [*data.ignore_fields, *sorted(survey.unknown)]
    batch = min(8, max(1, survey.groups // MIN_STEPS))
    batch = data.global_batch_groups if "data.global_batch_groups" in chosen else batch
    return values | {
        "data.files": files[0] if len(files) == 1 else files,
        "data.max_tokens": 32_768 if on_gpu else 4096,  # attention's mask is dense on a CPU
        "data.global_batch_groups": batch,
        "loss.name": survey.loss,
        "loss.reduction": "path_token_mean" if survey.marks else "token_mean",
        "optimizer.lr": 1e-5 if is_folder else 1e-3,
        "training.epochs": math.ceil(MIN_STEPS / math.ceil(survey.groups / batch)),
        "training.dtype": "bfloat16" if on_gpu else "float32",
        "training.compile": on_gpu,
        "training.activation_checkpoint": "selective" if on_gpu else "none",
        "checkpoint.export_hf": True,
    }


def _declared(chosen: Set[str]) -> set[str]:
    """Returns the declared keys among chosen ones: those of tables of free keys are one key."""
    names = {key.name for table in tables() for key in table.keys}
    return {name for name in names if any(f"{key}.".startswith(f"{name}.") for key in chosen)}
