"""Messages of the package ``tinker`` from and to arrays. What they mean stands in that package.

n tokens of a datum; k targets per token, where a datum has several.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from google.protobuf.message import DecodeError
from pydantic import BaseModel, ValidationError
from tinker import types
from tinker.proto import tinker_public_pb2 as pb

from titan_tree.errors import UserError, shorten

M = TypeVar("M", bound=BaseModel)
DTYPES = {pb.DTYPE_FLOAT32: np.float32, pb.DTYPE_INT64: np.int64, pb.DTYPE_INT32: np.int32}
TOKENS = np.dtype(np.int32)
MAX_DENSE = 2**27  # numbers of a matrix that came as a sparse one


@dataclass(frozen=True)
class Datum:
    """A sequence to train on.

    Attributes:
        tokens: [n] int32, what the model reads.
        inputs: by name, [n] or [n, k] each, what the loss reads; entry t speaks of what follows token t.
    """

    tokens: np.ndarray
    inputs: dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A request of a forward pass, and a backward pass unless ``forward_only``."""

    model: str
    number: int  # of the request among those of the model
    loss: str
    options: dict[str, float | str]
    forward_only: bool
    data: list[Datum]

    @property
    def kind(self) -> tuple[object, ...]:
        """Passes of a kind may run as one."""
        return self.model, self.loss, tuple(sorted(self.options.items())), self.forward_only


@dataclass(frozen=True)
class PassResult:
    """What a pass returns.

    Attributes:
        logprobs: of the targets of each datum, [n] or [n, k] fp32, in nats.
        metrics: by name; the part behind ":" says how clients combine those of several passes.
    """

    logprobs: list[np.ndarray]
    metrics: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A request to continue a prompt.

    Attributes:
        stop: token ids, or texts; None: where the model's answers end.
    """

    prompt: list[int]
    number: int = 1
    max_tokens: int | None = None
    seed: int | None = None
    stop: tuple[int, ...] | tuple[str, ...] | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    prompt_logprobs: bool = False

    @property
    def kind(self) -> tuple[object, ...]:
        """Samples of a kind may be drawn at once."""
        return self.stop, self.temperature, self.top_k, self.top_p


@dataclass(frozen=True)
class Sequences:
    """Continuations of one prompt.

    Attributes:
        turns: token ids, their log-probs in nats, and whether a stop ended them.
        prompt_logprobs: [n] fp32, NaN for the first token; None if they were not asked for.
    """

    turns: list[tuple[list[int], list[float], bool]] = field(default_factory=list)
    prompt_logprobs: np.ndarray | None = None


def read_json(kind: type[M], content: bytes) -> M:
    """Returns a request. Raises UserError, which names the first field that is wrong."""
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "body"
        raise UserError(f"{where}: {first['msg']}, got {shorten(first['input'])}") from None


def read_request(content: bytes) -> pb.ForwardBackwardRequest:
    """Returns the protobuf message of a pass. Raises UserError if it is none."""
    asked = pb.ForwardBackwardRequest()
    try:
        asked.ParseFromString(content)
    except DecodeError:
        expected = "body: expected a ForwardBackwardRequest in protobuf"
        raise UserError(f"{expected}, got {len(content):,} other bytes; use tinker 0.36 or newer") from None
    return asked


def read_pass(asked: pb.ForwardBackwardRequest) -> Pass:
    """Returns the pass that a message asks for. Raises UserError for data that no model here reads."""
    options: dict[str, float | str] = dict(asked.loss_fn_config)
    for name, value in asked.loss_fn_config_v2.items():
        options[name] = value.text if value.WhichOneof("value") == "text" else value.number
    return Pass(
        model=asked.model_id,
        number=asked.seq_id,
        loss=asked.loss_fn,
        options=options,
        forward_only=asked.forward_only,
        data=[_datum(index, datum) for index, datum in enumerate(asked.data)],
    )


def _datum(index: int, message: pb.Datum) -> Datum:
    chunks = []
    for chunk in message.model_input:
        if (kind := chunk.WhichOneof("chunk")) != "encoded_text":
            raise UserError(f"data[{index}].model_input: expected text as token ids, got {kind or 'nothing'}")
        chunks.append(_array(f"data[{index}].model_input", chunk.encoded_text.tokens, TOKENS))
    tokens = np.concatenate(chunks) if chunks else np.zeros(0, TOKENS)
    inputs = {name: _tensor(f"data[{index}].{name}", value) for name, value in message.loss_fn_inputs.items()}
    return Datum(tokens, inputs)


def _array(where: str, content: bytes, dtype: np.dtype) -> np.ndarray:
    if len(content) % dtype.itemsize:
        raise UserError(f"{where}: expected {dtype.itemsize} bytes per number, got {len(content):,} bytes")
    return np.frombuffer(content, dtype)


def _tensor(where: str, message: pb.Tensor) -> np.ndarray:
    """Returns a dense array. Entries that a sparse tensor leaves out are 0."""
    if message.dtype not in DTYPES:
        raise UserError(f"{where}: expected float32 or int64, got dtype {message.dtype}")
    dtype, shape, csr = np.dtype(DTYPES[message.dtype]), tuple(message.shape), message.sparse_csr
    if not message.HasField("sparse_csr"):
        values = _array(where, message.dense, dtype)
        shape = shape or (len(values),)
        if min(shape) < 0 or math.prod(shape) != len(values):
            raise UserError(f"{where}: expected {shape} numbers, got {len(values)}")
        return values.reshape(shape)
    values, ends, columns = (
        _array(where, content, np.dtype(kind))
        for content, kind in ((csr.values, dtype), (csr.crow_indices, np.int64), (csr.col_indices, np.int64))
    )
    sizes = np.diff(ends)
    if not (
        len(shape) == 2
        and min(shape) >= 0
        and math.prod(shape) <= MAX_DENSE
        and len(ends) == shape[0] + 1
        and len(values) == len(columns) == ends[-1]
        and ends[0] == 0
        and (sizes >= 0).all()
        and ((columns >= 0) & (columns < shape[1])).all()
    ):
        raise UserError(f"{where}: expected a sparse matrix in CSR form, got indices that do not fit {shape}")
    dense = np.zeros(shape, dtype)
    dense[np.repeat(np.arange(shape[0]), sizes), columns] = values
    return dense


def write_pass(result: PassResult) -> bytes:
    """Returns the protobuf message of a result: an ArrayRecord for each row of data with one k."""
    out = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=result.metrics)
    start = 0
    while start < len(result.logprobs):
        trailing = result.logprobs[start].shape[1:]
        stop = start
        while stop < len(result.logprobs) and result.logprobs[stop].shape[1:] == trailing:
            stop += 1
        arrays = [np.ascontiguousarray(x, np.float32) for x in result.logprobs[start:stop]]
        offsets = np.cumsum([0, *(x.nbytes for x in arrays)], dtype=np.int64)
        record = out.loss_fn_outputs.add(num_datums=len(arrays))
        record.fields["logprobs"].CopyFrom(
            pb.BatchedTensor(
                data=b"".join(x.tobytes() for x in arrays),
                offsets=offsets.tobytes(),
                dtype=pb.DTYPE_FLOAT32,
                trailing_shape=trailing,
            )
        )
        start = stop
    return out.SerializeToString()


def read_sample(asked: types.SampleRequest) -> Sample:
    """Returns what a request asks for. Raises UserError for what no sampler here gives."""
    for name, neutral in (
        ("topk_prompt_logprobs", 0),
        ("topk_sample_logprobs", 0),
        ("target_prompt_logprobs", None),
        ("prompt_alt_tokens_k", 0),
        ("prompt_logprobs_last_n", None),
    ):
        if (got := getattr(asked, name)) != neutral:
            raise UserError(f"{name}: expected {neutral}, which asks for nothing, got {shorten(got)}")
    if asked.record_stability_info:
        raise UserError(
            "record_stability_info: expected false, because what stable_reinforce computes is not published; "
            "use another loss, such as importance_sampling or cispo"
        )
    params = asked.sampling_params
    stop = (params.stop,) if isinstance(params.stop, str) else params.stop
    prompt: list[int] = []
    for chunk in asked.prompt.chunks:
        if not isinstance(chunk, types.EncodedTextChunk):
            raise UserError(f"prompt: expected text as token ids, got {chunk.type}")
        prompt += chunk.tokens
    return Sample(
        prompt=prompt,
        number=asked.num_samples,
        max_tokens=params.max_tokens,
        seed=params.seed,
        stop=None if stop is None else tuple(stop),  # type: ignore[arg-type]
        temperature=params.temperature,
        top_k=max(params.top_k, 0),
        top_p=params.top_p,
        prompt_logprobs=bool(asked.prompt_logprobs),
    )


def write_sequences(result: Sequences) -> bytes:
    """Returns the protobuf message of sampled sequences."""
    out = pb.SampleResponse()
    for tokens, logprobs, is_stopped in result.turns:
        out.sequences.add(
            stop_reason=pb.STOP_REASON_STOP if is_stopped else pb.STOP_REASON_LENGTH,
            tokens=np.array(tokens, np.int32).tobytes(),
            logprobs=np.array(logprobs, np.float32).tobytes(),
        )
    if result.prompt_logprobs is not None:
        out.prompt_logprobs = result.prompt_logprobs.astype(np.float32).tobytes()
    return out.SerializeToString()
