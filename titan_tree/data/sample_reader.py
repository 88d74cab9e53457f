"""SampleReader: data files -> groups -> training samples (TokenPaths)."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import numpy as np

from titan_tree.components.tree_tokenizer import TreeTokenizer
from titan_tree.components.tree_tokenizer.endings import ending
from titan_tree.components.tree_tokenizer.messages import IMAGE_TOKEN
from titan_tree.components.tree_tokenizer.templates import SETTINGS
from titan_tree.components.tree_tokenizer.tool_calls import doubtful
from titan_tree.data.advantages import advantages, check_options, rollout_rewards
from titan_tree.data.data_files import DataFiles, Group, Trajectory, group_records, group_trajectories
from titan_tree.data.images import Loaded, check_placeholders, record_images, with_loaded_images
from titan_tree.data.packing import longest_path
from titan_tree.data.readers import DEMO, Record, read_records
from titan_tree.data.readers.chat import marked
from titan_tree.data.readers.row_reader import NO_MEDIA, file_of, warn_once
from titan_tree.data.schema import (
    KNOWN,
    PATH_FIELDS,
    TOKEN_FIELDS,
    TRAJECTORY_KINDS,
    UnknownFields,
    check_messages,
    check_record,
    is_text,
    present_fields,
    record_name,
    refuse_fields,
    turn_weights,
)
from titan_tree.data.token_store import STORED, StoredGroup
from titan_tree.errors import UserError, count, errors_at, printable, shorten
from titan_tree.tree.path_fields import advantage_array, decoded_array, wrong
from titan_tree.tree.paths import ModelLimits, TokenPath
from titan_tree.tree.routed_experts import Replay, has_experts
from titan_tree.tree.token_tree import TokenTree

if TYPE_CHECKING:
    from titan_tree.data.settings import DataConfig

NO_LIMITS = ModelLimits()
REJECTED = ("rejected", "undesirable")  # preferences of worse answers
MANY_TOKENS = 8  # that a model samples with probability 1 only by accident
NEAR_0 = -1e-3  # log-probs above it often have few digits left, and are equal
logger = logging.getLogger(__name__)


class SampleReader:
    """Turns a group of the configured files into training samples.

    Args:
        config: ``files`` and ``format`` choose the records, and ``ignore_fields`` the fields that are not
            read; ``sample``, ``advantage`` and ``replay`` choose how records become training samples.
        tokenizer: renders and tokenizes conversations. Files of token ids do not need one.
        limits: limits of the model. Longer paths and larger token ids are errors. If ``config.replay`` uses
            recorded experts, they must fit the model's layers and experts.
        same_loss: the name of a loss that would train rejected answers like chosen ones, so that these are
            errors. None: the loss tells them apart, or there is none.
        preference_loss: the name of a loss that compares chosen and rejected answers, so that others are
            errors. None: the loss does not, or there is none.

    Attributes:
        files: the files, which yield the groups.
        endings: how many answers of the trajectories that were read are "cut off", and how many "filtered".
        rejected: how many of the samples that were read are marked as worse answers.

    Raises:
        UserError: a file does not exist or is named twice, or ``ignore_fields`` names a field that is read.
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: TreeTokenizer | None = None,
        limits: ModelLimits = NO_LIMITS,
        same_loss: str | None = None,
        preference_loss: str | None = None,
    ) -> None:
        self.config = config
        self.files = DataFiles(config)
        self.tokenizer = tokenizer
        self.limits = limits if config.replay != "off" else limits._replace(experts=None)
        self.fields = UnknownFields(config.ignore_fields)
        for name in config.ignore_fields:
            if any(name in known for kind, known in KNOWN.items() if kind != "a text"):
                raise UserError(
                    f"data.ignore_fields: {name!r} is a field that is read; remove it from the list"
                )
        if config.advantage != "given":
            check_options(config.advantage, config.advantage_options)
        elif config.advantage_options:
            raise UserError(
                "data.advantage_options: expected none with data.advantage = 'given'; remove them, or "
                "name an estimator in data.advantage"
            )
        self.endings: Counter[str] = Counter()
        self.same_loss, self.preference_loss, self.rejected = same_loss, preference_loss, 0
        self._checked_stores: set[str] = set()
        self._has_warned = False
        self._searched = set[str]()  # files in which all unknown fields were searched for

    def tree(self, group: Group, replay: Replay | None = None) -> TokenTree:
        """Returns the token tree of a group's samples.

        Args:
            replay: what the tree does with recorded experts; None: as configured.

        Raises:
            UserError: see ``paths``.
        """
        replay = self.config.replay if replay is None else replay
        tree = self._stored_tree(group)
        if tree is None:
            return TokenTree.from_paths(self.paths(group), replay)
        paths = self._chosen(group, tree.paths)
        if len(paths) == len(tree.paths) and (replay == "off" or not any(map(has_experts, paths))):
            return tree
        return TokenTree.from_paths(paths, replay)

    def _stored_tree(self, group: Group) -> TokenTree | None:
        """Returns the tree of a group of a token store, or None for other groups."""
        place, record = group.records[0]
        if STORED not in record:
            return None
        stored: StoredGroup = record[STORED]
        if stored.store.file not in self._checked_stores:
            stored.store.check_made_for(self.config, self.tokenizer)
            self._checked_stores.add(stored.store.file)
        tree = stored.tree()
        with errors_at(place):
            for path in tree.paths:
                path.check_limits(self.limits)
        return tree

    def paths(self, group: Group) -> list[TokenPath]:
        """Returns the training samples of a group in file order: those that ``config.paths`` chooses.

        Raises:
            UserError: a malformed sample; the message names file, line and field, and what was expected.
        """
        if (stored := self._stored_tree(group)) is not None:
            return self._chosen(group, stored.paths)
        paths = [path for _, paths in self.paths_by_trajectory(group) for path in paths]
        return self._chosen(group, paths)

    def _chosen(self, group: Group, paths: Sequence[TokenPath]) -> list[TokenPath]:
        rejected = [path for path in paths if path.preference in REJECTED and path.weight]
        self.rejected += len(rejected)
        if rejected and self.same_loss is not None:
            raise UserError(
                f"{group.records[0][0]}: path {rejected[0].id or '?'}: this answer is marked "
                f"{rejected[0].preference!r}, and the loss {self.same_loss!r} would train it like a good "
                'one; set loss.name = "dpo", or another loss of preferences, or remove such answers from the '
                "data"
            )
        others = [path for path in paths if path.preference is None and path.weight]
        if others and self.preference_loss is not None:
            raise UserError(
                f"{group.records[0][0]}: path {others[0].id or '?'}: the loss {self.preference_loss!r} "
                "compares chosen and rejected answers, and this answer has no preference; give rows with "
                'chosen and rejected, or set loss.name = "sft"'
            )
        if self.config.paths == "all":
            return list(paths)
        with errors_at(group.records[0][0]):
            chosen = longest_path(paths)
        TokenPath.join_rollout(chosen, group.id)  # other samples of the rollout are not trained
        return chosen

    def problems(self) -> tuple[list[UserError], int]:
        """Returns the errors of all rows and groups of the files, and the number of groups without one.

        A group has at most one. An error that leaves the rest of a file unreadable is the last of its file.
        """
        found: list[UserError] = []
        good = 0
        for file in self.files.paths:
            if file == DEMO:  # has none
                continue
            try:
                records = read_records(file, self.config.format, refuse=found.append)
                for group in group_records(records, {}):
                    try:
                        self.paths(group)
                        good += 1
                    except UserError as error:
                        found.append(error)
            except UserError as error:
                found.append(error)
        return found, good

    def paths_by_trajectory(self, group: Group) -> list[tuple[Trajectory, list[TokenPath]]]:
        """Returns the trajectories of a group in file order, each with the paths of all its samples.

        Raises:
            UserError: see ``paths``.
        """
        try:
            return self._paths_by_trajectory(group)
        except UserError as error:
            if not self.fields.problems:
                raise
            place = str(error).removesuffix(str(UserError(self.fields.message())))
            raise UserError(place + self._unknown_fields(file_of(group.records[0][0]))) from None
        finally:
            self.fields.problems.clear()

    def _unknown_fields(self, file: str) -> str:
        """Returns the message about the unknown fields that were found, and about those of the whole file."""
        if file in self._searched:
            return self.fields.message()
        self._searched.add(file)
        found = UnknownFields(self.config.ignore_fields, raises=False)
        found.problems |= self.fields.problems
        with suppress(UserError):  # of the rest of the file, which only unknown fields concern here
            for other in group_records(read_records(file, self.config.format), {}):
                with suppress(UserError):
                    for trajectory in group_trajectories(other, found):
                        self._check_fields(trajectory.record, found)
        return found.message()

    def _check_fields(self, record: Record, fields: UnknownFields) -> None:
        """Raises UserError for unknown fields of a trajectory and of its messages."""
        if is_text(record) or record.get("messages") is not None:
            refuse_fields(record, ("images",), NO_MEDIA)
        if is_text(record):
            check_record(record, "a text", fields)
        elif record.get("messages") is None:
            check_record(record, "token ids", fields)
        else:
            reason = (
                "not allowed together with messages, because the chat template makes the tokens; remove it"
            )
            refuse_fields(record, TOKEN_FIELDS, reason)
            check_record(record, "a conversation", fields)
            template_fields = self.tokenizer.template_fields if self.tokenizer else frozenset()
            check_messages(_marked_messages(record), template_fields, fields)

    def _paths_by_trajectory(self, group: Group) -> list[tuple[Trajectory, list[TokenPath]]]:
        trajectories = []
        loaded: Loaded = {}  # images of the group, each decoded once
        rollouts: dict[str | int, list[TokenPath]] = defaultdict(list)  # by rollout_id, or else by trajectory
        for number, trajectory in enumerate(group_trajectories(group, self.fields)):
            with errors_at(trajectory.place):
                paths = self._trajectory_paths(trajectory, loaded)
                _set_preference(paths, trajectory.record, group.id)
                name = record_name(trajectory.record, "rollout_id")
            trajectories.append((trajectory, paths))
            rollouts[number if name is None else name] += paths
        for key, members in rollouts.items():
            TokenPath.join_rollout(members, f"{group.id}{'#' if isinstance(key, int) else '/'}{key}")
        if self.config.advantage != "given":
            self._set_advantages(trajectories)
        return trajectories

    def _set_advantages(self, trajectories: Sequence[tuple[Trajectory, Sequence[TokenPath]]]) -> None:
        """Sets the advantages of a group's paths from its rewards."""
        name = self.config.advantage
        rewards, owners = rollout_rewards(name, [trajectory for trajectory, _ in trajectories])
        placed = [
            (trajectory.place, owner, path)
            for (trajectory, paths), owner in zip(trajectories, owners, strict=True)
            for path in paths
        ]
        paths, path_owners = [path for *_, path in placed], [owner for _, owner, _ in placed]
        values = advantages(name, paths, rewards, path_owners, **self.config.advantage_options)
        if len(rewards) == 1 and not any(map(np.any, values)):
            place = trajectories[0][0].place
            message = (
                f"one rollout is alone in its group, so data.advantage = {name!r} sets its advantages to 0; "
                "give rollouts of the same task one group_id"
            )
            warn_once(file_of(place), message, place)
        for (place, _, path), value in zip(placed, values, strict=True):
            with errors_at(place):
                path.advantage = advantage_array("advantage", value, len(path))

    def _trajectory_paths(self, trajectory: Trajectory, loaded: Loaded) -> list[TokenPath]:
        place, name, record = trajectory
        kinds = [kind for kind in TRAJECTORY_KINDS if record.get(kind) is not None]
        if is_text(record):
            paths = [self._text_path(name, record)]
        elif len(kinds) != 1:
            raise _wrong_kind(record, kinds)
        elif kinds == ["messages"]:
            paths = self._conversation_paths(trajectory, loaded)
        else:
            self._check_fields(record, self.fields)
            paths = [_token_path(trajectory, kinds[0], loaded, self.tokenizer)]
            self.endings[ending(record.get("finish_reason"), "finish_reason")] += 1
            self._warn_about_logprobs(place, paths[0])
        for path in paths:
            path.check_limits(self.limits)
        return paths

    def _text_path(self, name: str, record: Record) -> TokenPath:
        """Returns the path of a text as it is. Its prompt is not trained, and no token is added."""
        if self.tokenizer is None:
            raise UserError("text: text needs a tokenizer, and none is set; set data.tokenizer")
        self._check_fields(record, self.fields)
        prompt, text = record.get("prompt") or "", record["text"]
        if not isinstance(prompt, str):
            raise wrong("prompt", "a string beside text", type(prompt).__name__)
        if not text:
            raise UserError("text: expected text to train on, got an empty string; remove the row")
        context, trained = self.tokenizer.encode(prompt), self.tokenizer.encode(text)
        self.endings[ending(record.get("finish_reason"), "finish_reason")] += 1
        mask = [0] * len(context) + [1] * len(trained)
        return TokenPath(context + trained, mask, id=name, **present_fields(record, PATH_FIELDS))

    def _conversation_paths(self, trajectory: Trajectory, loaded: Loaded) -> list[TokenPath]:
        place, name, record = trajectory
        if self.tokenizer is None:
            raise UserError("messages: conversations need a tokenizer, and none is set; set data.tokenizer")
        self._check_fields(record, self.fields)
        fields = present_fields(record, PATH_FIELDS)
        for field, value in fields.items():
            if isinstance(value, list):
                raise wrong(field, "one number for a conversation", "a list")
        folder = os.path.dirname(file_of(place))
        messages = with_loaded_images(_marked_messages(record), folder, loaded)
        options = self.config.sample | self._variables(place, record) | present_fields(record, ("turns",))
        paths = self.tokenizer.samples(messages, record.get("tools"), **options)
        turns = _trained_turns(messages, paths, options.get("turns", "each"))
        if not turns:
            got = f"{count(len(paths), 'answer')} with weight 0 or filtered" if paths else "none"
            raise UserError(f"messages: expected at least one assistant turn to train on, got {got}")
        for message_place, doubt in doubtful(messages):
            warn_once(file_of(place), doubt, f"{place}: messages{message_place}")
        self.endings.update(ending(message.get("finish_reason"), "finish_reason") for message in messages)
        for turn, path in turns:
            path.id = f"{name}/{turn}"
        chosen = [path for _, path in turns]
        return [dataclasses.replace(path, **fields) for path in chosen] if fields else chosen

    def _variables(self, place: str, record: Record) -> dict[str, Any]:
        """Returns the template variables of a conversation. Warns once about those that nothing reads."""
        given = record.get("chat_template_kwargs")
        if given is None:
            return {}
        reserved = {*SETTINGS, "messages", "tools"}
        if not isinstance(given, dict) or reserved & given.keys():
            expected = f"an object of template variables, without {', '.join(sorted(reserved))}"
            raise wrong("chat_template_kwargs", expected, shorten(given))
        assert self.tokenizer is not None
        read = {name: value for name, value in given.items() if name in self.tokenizer.template_variables}
        for name in sorted(given.keys() - read.keys()):
            doubt = f"chat_template_kwargs: the template reads no variable {name!r}, so it has no effect"
            warn_once(file_of(place), doubt, place)
        return read

    def _warn_about_logprobs(self, place: str, path: TokenPath) -> None:
        """Warns once about a path whose log-probs are not those of its tokens: all 0, or means of answers."""
        for field in ("old_logprobs", "rollout_logprobs"):
            values = getattr(path, field)
            if self._has_warned or values is None:
                continue
            scored = values[1:][path.loss_mask[1:] > 0]
            if len(scored) < MANY_TOKENS:
                continue
            repeats = (scored[1:] == scored[:-1]) & (scored[1:] < NEAR_0)
            doubt = "all of them are 0, as if the model could say nothing else; check that they were recorded"
            if repeats.mean() > 0.5:
                doubt = (
                    "neighbors are equal, as if each were the mean of its answer; record one for each token"
                )
            elif scored.any():
                continue
            self._has_warned = True
            logger.warning("%s: %s: %s, or remove the field", printable(place), field, doubt)


def _wrong_kind(record: Record, kinds: Sequence[str]) -> UserError:
    """Returns the error for a trajectory that has no field with its content, or several."""
    expected = "expected one of the fields trajectories, messages, tokens, input_ids, text"
    if isinstance(record.get("prompt"), list) and not kinds:
        return UserError(
            f"{expected}; got a prompt without an answer, as in the data sets of verl: sample answers first, "
            "and give those (a completion, or verl's trainer.rollout_data_dir)"
        )
    asked, answered = ({"prompt", "question"} & record.keys(), {"response", "answer"} & record.keys())
    if asked and answered and not kinds:
        return UserError(
            f"{expected}; got a question and its answer: give them as messages, or, to train without a "
            "chat template, as the texts prompt and completion"
        )
    present = " and ".join(kinds) or ", ".join(record)[:60] or "an empty object"
    for field in record if not kinds else ():
        if close := get_close_matches(field, ("trajectories", *TRAJECTORY_KINDS), n=1, cutoff=0.75):
            return UserError(f"{expected}; got {present}; did you mean {close[0]!r} by {field[:60]!r}?")
    if kinds:
        return UserError(f"{expected}; got {present}")
    hint = "rename the fields as in a format of docs/data.md"
    if "custom_id" in record:
        hint = 'join requests and results by custom_id: {"request": body, "response": response.body}'
    elif isinstance(record.get("request"), str):
        hint = "request holds text: parse it and the response with json.loads, and write them as objects"
    elif "choices" in record:
        hint = 'log each answer with its request: {"request": ..., "response": ...}'
    return UserError(f"{expected}; got {present}; {hint}")


def _marked_messages(record: Record) -> Any:
    """Returns the messages of a conversation; its ``finish_reason`` becomes that of the last message."""
    messages, mark = record["messages"], record.get("finish_reason")
    if mark is None or not isinstance(messages, list) or not messages or not isinstance(messages[-1], dict):
        return messages
    if messages[-1].get("role") != "assistant":
        raise UserError("finish_reason: expected a conversation that ends with an answer of the assistant")
    return [*messages[:-1], *marked(messages[-1:], mark, "finish_reason")]


def _set_preference(paths: Sequence[TokenPath], record: Record, group_id: str) -> None:
    """Sets ``preference`` and ``pair`` of a trajectory's path. The name of a pair is unique to its group."""
    if (preference := record.get("preference")) is None:
        refuse_fields(record, ("pair",), "expected a preference beside it, 'chosen' or 'rejected'")
        return
    if len(paths) != 1:
        raise UserError(
            f"preference: expected a trajectory of one sample, got {len(paths)} turns; set turns to 'last' "
            "or 'whole'"
        )
    pair = record_name(record, "pair")
    paths[0].set_preference(preference, group_id if pair is None else f"{group_id}/{pair}")


def _trained_turns(
    messages: Sequence[Record], paths: Sequence[TokenPath], turns: str
) -> list[tuple[int, TokenPath]]:
    """Returns the numbered paths of a conversation without those of messages with weight 0."""
    weights = turn_weights(messages)
    numbered = list(enumerate(paths, start=1))
    if 0 not in weights:
        return numbered
    if turns == "whole":
        raise UserError(
            "messages: weight 0 is not supported by turns = 'whole'; use turns = 'each' or 'last'"
        )
    weights = weights[-len(numbered) :]  # turns = "last" makes one path
    return [item for item, weight in zip(numbered, weights, strict=True) if weight]


def _token_path(
    trajectory: Trajectory, kind: str, loaded: Loaded, tokenizer: TreeTokenizer | None
) -> TokenPath:
    """Returns the path of a trajectory whose field ``kind`` holds token ids; no loss on filtered ones."""
    place, name, record = trajectory
    fields = present_fields(record, (*TOKEN_FIELDS, *PATH_FIELDS))
    if isinstance(encoded := fields.get("routed_experts"), str):
        fields["routed_experts"] = decoded_array("routed_experts", encoded)
    if "images" in fields:
        image_id = tokenizer.special_tokens.get(IMAGE_TOKEN) if tokenizer else None
        places = [index for index, token in enumerate(record[kind]) if token == image_id]
        folder = os.path.dirname(file_of(place))
        fields["images"] = record_images(fields["images"], folder, loaded, places)
    path = TokenPath(record[kind], id=name, **fields)
    if path.images:
        check_placeholders(path)
    if ending(record.get("finish_reason"), "finish_reason") == "filtered":
        path.loss_mask = np.zeros_like(path.loss_mask)
    return path
