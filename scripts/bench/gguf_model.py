"""Writes a GGUF file of a Qwen3 model (needs gguf and numpy): of a shape, with random bf16 weights and no tokenizer, or of a checkpoint
with its weights and its byte-level BPE tokenizer:

    scripts/bench/gguf_model.py examples/tiny tiny.gguf
"""

import json
import struct
import sys
from pathlib import Path

import gguf
import numpy


def random_bf16(generator, count):
    """`count` bf16 numbers as uint16 bits: random sign and mantissa, magnitudes from 2^-12 to 2^-5, so that the
    activations stay finite and no product is denormal."""
    bits = numpy.frombuffer(generator.bytes(2 * count), dtype=numpy.uint16)
    exponent = 115 + ((bits >> 7) & 7)
    return (bits & 0x807F) | (exponent << 7).astype(numpy.uint16)


# For each tensor of a layer: its name in GGUF, and in a checkpoint.
LAYER = (
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("attn_output", "self_attn.o_proj"),
    ("ffn_norm", "post_attention_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
)


def tensors_of(config):
    """For each tensor: its names in GGUF and in a checkpoint, and its shape."""
    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    head_dim, vocabulary = config["head_dim"], config["vocab_size"]
    query = config["num_attention_heads"] * head_dim
    key = config["num_key_value_heads"] * head_dim
    shapes = ((hidden,), (query, hidden), (key, hidden), (key, hidden), (head_dim,), (head_dim,), (hidden, query), (hidden,),
              (intermediate, hidden), (intermediate, hidden), (hidden, intermediate))
    tensors = [("token_embd.weight", "model.embed_tokens.weight", (vocabulary, hidden)), ("output_norm.weight", "model.norm.weight", (hidden,))]
    if not config["tie_word_embeddings"]:
        tensors.append(("output.weight", "lm_head.weight", (vocabulary, hidden)))
    for layer in range(config["num_hidden_layers"]):
        for (ours, theirs), shape in zip(LAYER, shapes):
            tensors.append((f"blk.{layer}.{ours}.weight", f"model.layers.{layer}.{theirs}.weight", shape))
    return tensors


def begin(path, config):
    """A writer with the fields of the model's shape."""
    rope = config.get("rope_parameters") or {}
    writer = gguf.GGUFWriter(str(path), "qwen3")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope.get("rope_theta") or config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    return writer


def end(writer, tensors, data):
    """Writes the tensors; `data(name, shape)` returns a matrix's bf16 bits, or a norm's f32 numbers."""
    for name, _, shape in tensors:
        if len(shape) == 1:  # norms are f32 in GGUF
            writer.add_tensor_info(name, shape, numpy.dtype(numpy.float32), 4 * shape[0])
        else:
            rows, columns = shape
            writer.add_tensor_info(
                name, (rows, 2 * columns), numpy.dtype(numpy.uint8), 2 * rows * columns, gguf.GGMLQuantizationType.BF16
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, name, shape in tensors:
        values = data(name, shape)
        writer.write_tensor_data(values if len(shape) == 1 else values.view(numpy.uint8).reshape(shape[0], 2 * shape[1]))
    writer.close()


def write(path, config, seed=1):
    """Writes the model of `config` (the fields of a Hugging Face config.json) with random weights to `path`."""
    generator = numpy.random.default_rng(seed)

    def data(_, shape):
        return numpy.ones(shape, dtype=numpy.float32) if len(shape) == 1 else random_bf16(generator, shape[0] * shape[1])

    writer = begin(path, config)
    writer.add_tokenizer_model("none")
    end(writer, tensors_of(config), data)


def add_tokenizer(writer, folder, config):
    """The byte-level BPE of `tokenizer.json`."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    model = tokenizer["model"]
    if model["type"] != "BPE":
        sys.exit(f"gguf_model: {folder}: the tokenizer is {model['type']}, not BPE")
    tokens = [f"[unused{number}]" for number in range(config["vocab_size"])]
    types = [gguf.TokenType.UNUSED] * len(tokens)
    for token, number in model["vocab"].items():
        tokens[number], types[number] = token, gguf.TokenType.NORMAL
    for added in tokenizer.get("added_tokens", ()):
        tokens[added["id"]], types[added["id"]] = added["content"], gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_add_bos_token(False)


def convert(folder, path):
    """Writes the checkpoint in `folder` (one safetensors file of bf16) to `path`."""
    config = json.loads((folder / "config.json").read_text())
    with open(folder / "model.safetensors", "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        places = json.loads(file.read(length))
        bits = numpy.frombuffer(file.read(), dtype=numpy.uint8)

    def data(name, shape):
        place = places[name]
        if place["dtype"] != "BF16" or tuple(place["shape"]) != shape:
            sys.exit(f"gguf_model: {name} is {place['dtype']} {place['shape']}, not BF16 {list(shape)}")
        values = bits[slice(*place["data_offsets"])].view(numpy.uint16)
        return (values.astype(numpy.uint32) << 16).view(numpy.float32) if len(shape) == 1 else values

    writer = begin(path, config)
    add_tokenizer(writer, folder, config)
    end(writer, tensors_of(config), data)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
