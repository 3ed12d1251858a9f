"""A random Llama small enough for tests (107,200 parameters) and regular enough for the real vLLM and DeepSpeed.

    2 layers, width 64, 2 heads of 32 on 1 key/value head, untied output head, context 512, float32
    token id = byte value (0..255), 256 pad, 257 bos, 258 eos

Use `actors.models.make_tiny_llama`, which makes the directory whole or not at all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

CONTEXT = 512
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,  # the smallest that vLLM's CPU attention knows
    "max_position_embeddings": CONTEXT,
}


def write_tiny_llama(out: Path, seed: int) -> None:
    write_byte_llama(out, seed, "float32", **TINY)


def write_byte_llama(out: Path, seed: int, dtype: str, **shape: int) -> None:
    """A random Llama that speaks bytes, of another shape: keywords of `transformers.LlamaConfig`."""
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    tokenizer = byte_tokenizer()
    ids: dict[str, Any] = {"pad_token_id": 256, "bos_token_id": 257, "eos_token_id": 258}
    config = LlamaConfig(vocab_size=len(tokenizer), tie_word_embeddings=False, **shape, **ids)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = LlamaForCausalLM(config).to(getattr(torch, dtype))
    model.generation_config = GenerationConfig(**ids)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def byte_tokenizer() -> Any:
    """Token id = byte value; 256 pad, 257 bos, 258 eos. Every text is encodable and decodes to itself."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    # GPT-2's alphabet: printable characters stand for themselves, the other bytes are moved up to 256 and on.
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in plain)}
    vocab = {moved.get(b, chr(b)): b for b in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<bos>", "<eos>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 257)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = (
        "<bos>{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    return fast
