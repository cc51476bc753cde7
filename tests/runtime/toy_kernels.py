"""Kernels of a program without a model, for Triton's interpreter.

Like toy_program.cpp they keep token ids in the KV pool, and the logits of a row are a hash of every token found there through
the block table: any mistake in addresses, padding or order changes the tokens that come out.
"""

import triton
import triton.language as tl


@triton.jit
def toy_embed(token_ids, table, untouched, x, num_tokens):
    """x[t] = table[token_ids[t]] + untouched[0]; the latter is arena that nothing writes, so it is 0."""
    tokens = tl.program_id(0) * 4 + tl.arange(0, 4)
    ids = tl.load(token_ids + tokens, mask=tokens < num_tokens, other=0)
    tl.store(x + tokens, tl.load(table + ids) + tl.load(untouched), mask=tokens < num_tokens)


@triton.jit
def toy_append(x, positions, query_start, block_table, kv_pool, num_tokens, num_seqs, max_blocks, words):
    """The pool's words of each token's block and position get x; a padded token, of position -1, has none."""
    tokens = tl.program_id(0) * 4 + tl.arange(0, 4)
    sequences = tl.arange(0, 64)
    ends = tl.load(query_start + 1 + sequences, mask=sequences < num_seqs, other=2147483647)
    sequence = tl.sum((ends[None, :] <= tokens[:, None]).to(tl.int32), axis=1)
    position = tl.load(positions + tokens, mask=tokens < num_tokens, other=-1)
    exists = position >= 0
    block = tl.load(block_table + sequence * max_blocks + position // 16, mask=exists, other=0)
    value = tl.load(x + tokens, mask=exists, other=0.0).to(tl.int32)
    tl.store(kv_pool + block * words + position % 16, value, mask=exists)


@triton.jit
def toy_logits(
    logit_rows, positions, query_start, context_len, block_table, kv_pool, bias, logits, num_seqs, max_blocks, words, vocab_size
):
    """logits[r, v] = hash(bias, every token up to the row's, v), whatever the phase; sequences are found by query_start."""
    row = tl.program_id(0)
    token = tl.load(logit_rows + row)
    sequences = tl.arange(0, 64)
    ends = tl.load(query_start + 1 + sequences, mask=sequences < num_seqs, other=2147483647)
    sequence = tl.sum((ends <= token).to(tl.int32), axis=0)
    _hash_row(row, token, sequence, positions, context_len, block_table, kv_pool, bias, logits, max_blocks, words, vocab_size)


@triton.jit
def toy_decode_logits(logit_rows, positions, context_len, block_table, kv_pool, bias, logits, max_blocks, words, vocab_size):
    """The same for one token of each sequence: token t is of sequence t."""
    row = tl.program_id(0)
    token = tl.load(logit_rows + row)
    _hash_row(row, token, token, positions, context_len, block_table, kv_pool, bias, logits, max_blocks, words, vocab_size)


@triton.jit
def _hash_row(row, token, sequence, positions, context_len, block_table, kv_pool, bias, logits, max_blocks, words, vocab_size):
    at = tl.arange(0, 256)
    visible = (at <= tl.load(positions + token)) & (at < tl.load(context_len + sequence))
    block = tl.load(block_table + sequence * max_blocks + at // 16, mask=visible, other=0)
    value = tl.load(kv_pool + block * words + at % 16, mask=visible, other=0).to(tl.int64)
    state = tl.sum(tl.where(visible, (value + 1) * (2 * at + 1) * (at + 7), 0), axis=0) + tl.load(bias).to(tl.int64)
    columns = tl.arange(0, 512)
    mixed = (state * 2654435761 + columns * 40503) * 2246822519
    tl.store(logits + row * vocab_size + columns, ((mixed >> 15) & 0xFFFF).to(tl.float32), mask=columns < vocab_size)


@triton.jit
def toy_sample(logits, settings_f32, settings_i64, sampled, num_rows, vocab_size):
    """The likeliest token, or with a temperature one that is moved by seed and offset."""
    row = tl.program_id(0)
    columns = tl.arange(0, 512)
    values = tl.load(logits + row * vocab_size + columns, mask=columns < vocab_size, other=-1.0)
    best = tl.argmax(values, axis=0)
    seed = tl.load(settings_i64 + row * 4 + 2)
    offset = tl.load(settings_i64 + row * 4 + 3)
    moved = (best + (seed & 0xFFFF) + offset * 7) % vocab_size
    token = tl.where(tl.load(settings_f32 + row * 8) > 0.0, moved, best)
    tl.store(sampled + row, token.to(tl.int32), mask=row < num_rows)
