"""The tensors of the Triton model, once: config.pbtxt is written from these tables, requests are
read and answered by them.

Names, types and dims are those of tensorrtllm_backend's `ensemble` and `tensorrt_llm_bls`; what is
ours is marked. Dims leave out the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

MAX_BATCH = 1  # requests are batched by the scheduler, so a Triton batch is one request


class Use(Enum):
    """What becomes of an input."""

    READ = "read"
    IGNORED = "accepted, without effect"
    REFUSED = "refused when it asks for anything"


@dataclass(frozen=True)
class Tensor:
    """One input or output; `dtype` as in config.pbtxt, without TYPE_."""

    name: str
    dtype: str
    dims: tuple[int, ...] = (1,)
    use: Use = Use.READ
    default: object = None  # the value of a refused input that asks for nothing


def _refused(name: str, dtype: str, dims: tuple[int, ...] = (1,), default: object = None) -> Tensor:
    return Tensor(name, dtype, dims, Use.REFUSED, default)


def _ignored(name: str, dtype: str) -> Tensor:
    return Tensor(name, dtype, use=Use.IGNORED)


_MANY = (-1,)

INPUTS = (
    Tensor("text_input", "STRING"),
    Tensor("max_tokens", "INT32"),
    Tensor("stop_words", "STRING", _MANY),
    Tensor("bad_words", "STRING", _MANY),
    Tensor("end_id", "INT32"),
    Tensor("top_k", "INT32"),
    Tensor("top_p", "FP32"),
    Tensor("temperature", "FP32"),
    Tensor("repetition_penalty", "FP32"),
    Tensor("presence_penalty", "FP32"),
    Tensor("frequency_penalty", "FP32"),
    Tensor("min_tokens", "INT32"),
    Tensor("min_length", "INT32"),  # what min_tokens was called
    Tensor("seed", "UINT64"),
    Tensor("random_seed", "UINT64"),  # what seed was called
    Tensor("embedding_bias_words", "STRING", _MANY),
    Tensor("embedding_bias_weights", "FP32", _MANY),
    Tensor("stream", "BOOL"),
    Tensor("exclude_input_in_output", "BOOL"),
    Tensor("return_log_probs", "BOOL"),
    Tensor("return_perf_metrics", "BOOL"),
    Tensor("return_num_input_tokens", "BOOL"),
    Tensor("return_num_output_tokens", "BOOL"),
    # Ours: other forms of a prompt (one of the three), and what else a request may say.
    Tensor("messages", "STRING"),  # a JSON list, for the chat template
    Tensor("input_ids", "INT32", _MANY),
    Tensor("chat_template_kwargs", "STRING"),  # a JSON object
    Tensor("min_p", "FP32"),
    Tensor("ignore_eos", "BOOL"),
    Tensor("stop_token_ids", "INT32", _MANY),
    Tensor("timeout_seconds", "FP32"),
    Tensor("return_finish_reason", "BOOL"),
    Tensor("return_token_ids", "BOOL"),
    # One beam, no padding, a drafter that never changes the output: these change nothing.
    _ignored("pad_id", "INT32"),
    _ignored("length_penalty", "FP32"),
    _ignored("num_draft_tokens", "INT32"),
    _ignored("use_draft_logits", "BOOL"),
    _refused("num_return_sequences", "INT32", default=1),
    _refused("beam_width", "INT32", default=1),
    _refused("decoder_text_input", "STRING", default=b""),
    _refused("return_context_logits", "BOOL", default=False),
    _refused("return_generation_logits", "BOOL", default=False),
    _refused("prompt_embedding_table", "FP16", (-1, -1)),
    _refused("prompt_table_extra_id", "UINT64"),
    _refused("prompt_vocab_size", "INT32", default=0),
    _refused("lora_task_id", "UINT64", default=0),
    _refused("lora_weights", "FP16", (-1, -1)),
    _refused("lora_config", "INT32", (-1, 3)),
    _refused("guided_decoding_guide_type", "STRING", default=b""),
    _refused("guided_decoding_guide", "STRING", default=b""),
    _refused("image_input", "FP16", (-1, 3, -1, -1)),
    _refused("image_bytes_input", "UINT8", (-1, -1, -1, -1)),
    _refused("image_url_input", "STRING", default=b""),
    _refused("video_bytes_input", "UINT8", (-1, -1, -1, -1)),
)

OUTPUTS = (
    Tensor("text_output", "STRING"),
    Tensor("cum_log_probs", "FP32"),
    Tensor("output_log_probs", "FP32", (-1, -1)),
    Tensor("batch_index", "INT32"),
    Tensor("sequence_index", "INT32"),
    Tensor("num_input_tokens", "INT32"),
    Tensor("num_output_tokens", "INT32"),
    Tensor("acceptance_rate", "FP32"),
    Tensor("total_accepted_draft_tokens", "INT32"),
    Tensor("total_draft_tokens", "INT32"),
    Tensor("arrival_time_ns", "INT64"),
    Tensor("first_token_time_ns", "INT64"),
    Tensor("last_token_time_ns", "INT64"),
    # Ours.
    Tensor("finish_reason", "STRING"),
    Tensor("output_ids", "INT32", _MANY),
    Tensor("acceptance_length", "FP32"),
)
