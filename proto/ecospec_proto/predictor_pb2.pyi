from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ExpertDtype(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EXPERT_DTYPE_UNSPECIFIED: _ClassVar[ExpertDtype]
    EXPERT_DTYPE_UINT8: _ClassVar[ExpertDtype]
    EXPERT_DTYPE_UINT16: _ClassVar[ExpertDtype]
EXPERT_DTYPE_UNSPECIFIED: ExpertDtype
EXPERT_DTYPE_UINT8: ExpertDtype
EXPERT_DTYPE_UINT16: ExpertDtype

class TreeQuery(_message.Message):
    __slots__ = ("context_tokens", "draft_tokens", "parents", "session_id", "context_start")
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_START_FIELD_NUMBER: _ClassVar[int]
    context_tokens: bytes
    draft_tokens: bytes
    parents: bytes
    session_id: int
    context_start: int
    def __init__(self, context_tokens: _Optional[bytes] = ..., draft_tokens: _Optional[bytes] = ..., parents: _Optional[bytes] = ..., session_id: _Optional[int] = ..., context_start: _Optional[int] = ...) -> None: ...

class TreePrediction(_message.Message):
    __slots__ = ("experts",)
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    experts: bytes
    def __init__(self, experts: _Optional[bytes] = ...) -> None: ...

class PredictRequest(_message.Message):
    __slots__ = ("target_fingerprint", "trees", "end_sessions")
    TARGET_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TREES_FIELD_NUMBER: _ClassVar[int]
    END_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    target_fingerprint: str
    trees: _containers.RepeatedCompositeFieldContainer[TreeQuery]
    end_sessions: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, target_fingerprint: _Optional[str] = ..., trees: _Optional[_Iterable[_Union[TreeQuery, _Mapping]]] = ..., end_sessions: _Optional[_Iterable[int]] = ...) -> None: ...

class PredictResponse(_message.Message):
    __slots__ = ("expert_dtype", "trees", "model_version", "model_nanoseconds")
    EXPERT_DTYPE_FIELD_NUMBER: _ClassVar[int]
    TREES_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_NANOSECONDS_FIELD_NUMBER: _ClassVar[int]
    expert_dtype: ExpertDtype
    trees: _containers.RepeatedCompositeFieldContainer[TreePrediction]
    model_version: str
    model_nanoseconds: int
    def __init__(self, expert_dtype: _Optional[_Union[ExpertDtype, str]] = ..., trees: _Optional[_Iterable[_Union[TreePrediction, _Mapping]]] = ..., model_version: _Optional[str] = ..., model_nanoseconds: _Optional[int] = ...) -> None: ...

class PredictStreamRequest(_message.Message):
    __slots__ = ("request_id", "request", "timeout_microseconds", "traceparent")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MICROSECONDS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    request: PredictRequest
    timeout_microseconds: int
    traceparent: str
    def __init__(self, request_id: _Optional[int] = ..., request: _Optional[_Union[PredictRequest, _Mapping]] = ..., timeout_microseconds: _Optional[int] = ..., traceparent: _Optional[str] = ...) -> None: ...

class PredictStreamResponse(_message.Message):
    __slots__ = ("request_id", "response", "error")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    response: PredictResponse
    error: StreamError
    def __init__(self, request_id: _Optional[int] = ..., response: _Optional[_Union[PredictResponse, _Mapping]] = ..., error: _Optional[_Union[StreamError, _Mapping]] = ...) -> None: ...

class StreamError(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class GetModelInfoRequest(_message.Message):
    __slots__ = ("target_fingerprint",)
    TARGET_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    target_fingerprint: str
    def __init__(self, target_fingerprint: _Optional[str] = ...) -> None: ...

class GetModelInfoResponse(_message.Message):
    __slots__ = ("model_version", "target_name", "target_revision", "target_fingerprint", "vocab_size", "hidden_size", "moe_layers", "experts", "top_k", "max_context_tokens", "max_nodes_per_tree", "max_trees")
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    TARGET_NAME_FIELD_NUMBER: _ClassVar[int]
    TARGET_REVISION_FIELD_NUMBER: _ClassVar[int]
    TARGET_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    MOE_LAYERS_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_NODES_PER_TREE_FIELD_NUMBER: _ClassVar[int]
    MAX_TREES_FIELD_NUMBER: _ClassVar[int]
    model_version: str
    target_name: str
    target_revision: str
    target_fingerprint: str
    vocab_size: int
    hidden_size: int
    moe_layers: int
    experts: int
    top_k: int
    max_context_tokens: int
    max_nodes_per_tree: int
    max_trees: int
    def __init__(self, model_version: _Optional[str] = ..., target_name: _Optional[str] = ..., target_revision: _Optional[str] = ..., target_fingerprint: _Optional[str] = ..., vocab_size: _Optional[int] = ..., hidden_size: _Optional[int] = ..., moe_layers: _Optional[int] = ..., experts: _Optional[int] = ..., top_k: _Optional[int] = ..., max_context_tokens: _Optional[int] = ..., max_nodes_per_tree: _Optional[int] = ..., max_trees: _Optional[int] = ...) -> None: ...
