"""Writes a GGUF file of a Qwen3 shape with random bf16 weights and no tokenizer (needs gguf and numpy)."""

import gguf
import numpy


def random_bf16(generator, count):
    """`count` bf16 numbers as uint16 bits: random sign and mantissa, magnitudes from 2^-12 to 2^-5, so that the
    activations stay finite and no product is denormal."""
    bits = numpy.frombuffer(generator.bytes(2 * count), dtype=numpy.uint16)
    exponent = 115 + ((bits >> 7) & 7)
    return (bits & 0x807F) | (exponent << 7).astype(numpy.uint16)


def write(path, config, seed=1):
    """Writes the model of `config` (the fields of a Hugging Face config.json) to `path`."""
    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    head_dim, vocabulary = config["head_dim"], config["vocab_size"]
    query = config["num_attention_heads"] * head_dim
    key = config["num_key_value_heads"] * head_dim

    tensors = [("token_embd.weight", (vocabulary, hidden)), ("output_norm.weight", (hidden,))]
    if not config["tie_word_embeddings"]:
        tensors.append(("output.weight", (vocabulary, hidden)))
    for layer in range(config["num_hidden_layers"]):
        for name, shape in (
            ("attn_norm", (hidden,)),
            ("attn_q", (query, hidden)),
            ("attn_k", (key, hidden)),
            ("attn_v", (key, hidden)),
            ("attn_q_norm", (head_dim,)),
            ("attn_k_norm", (head_dim,)),
            ("attn_output", (hidden, query)),
            ("ffn_norm", (hidden,)),
            ("ffn_gate", (intermediate, hidden)),
            ("ffn_up", (intermediate, hidden)),
            ("ffn_down", (hidden, intermediate)),
        ):
            tensors.append((f"blk.{layer}.{name}.weight", shape))

    writer = gguf.GGUFWriter(str(path), "qwen3")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(intermediate)
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(vocabulary)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("none")
    for name, shape in tensors:
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
    generator = numpy.random.default_rng(seed)
    for _, shape in tensors:
        if len(shape) == 1:
            writer.write_tensor_data(numpy.ones(shape, dtype=numpy.float32))
        else:
            rows, columns = shape
            writer.write_tensor_data(random_bf16(generator, rows * columns).view(numpy.uint8).reshape(rows, 2 * columns))
    writer.close()
