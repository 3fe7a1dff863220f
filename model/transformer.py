"""A dense Llama-class decoder: one spine, and two branches in every block.

The spine (residual stream) is one vector of `width` numbers per token, from the embedding to the LM head. Every block
adds to it twice and never overwrites it:

    x  += attention_branch(norm(x))
    x' += feed_forward_branch(norm(x'))

Llama, Mistral, Qwen 2 (biases on q, k and v) and Qwen 3 (norms on the heads of q and k) are this one model.
"""

from collections.abc import Callable, Iterator
from functools import cached_property, partial

import torch
from torch import Tensor

from octavo.model.arena import ActivationArena
from octavo.model.attention import AttentionBackend
from octavo.model.config import ModelConfig
from octavo.model.kernels import FP8_KIND, GatedLinear, Kernels, Linear
from octavo.model.layers import RMSNorm, rope_table
from octavo.model.matrices import BlockMatrices, kept_quantised, vocabulary_matrices
from octavo.model.parallel import Ranks
from octavo.model.stacked import destinations, fused_linear
from octavo.model.weights.destination import Destination


class Activations:
    """The arena's views of one step. q, k and v are views of qkv; heads_out is a view of attended."""

    def __init__(self, arena: ActivationArena, config: ModelConfig, tokens: int) -> None:
        """Name the parts of the arena that a step of so many tokens (padding included) uses."""
        k_begin, v_begin = config.q_width, config.q_width + config.kv_width
        self.positions = arena.view("positions", tokens)[:, 0]
        """int32 [tokens]"""
        self.spine = arena.view("spine", tokens)
        """[tokens, width]: the residual stream."""
        self.to_attention = arena.view("to_attention", tokens)
        """[tokens, width]: norm(x), then from the block below its feed-forward branch before the addition."""
        self.qkv = arena.view("qkv", tokens)
        """[tokens, q_width + 2 * kv_width]"""
        self.q = self.qkv[:, :k_begin].view(tokens, config.heads, config.head_dim)
        self.k = self.qkv[:, k_begin:v_begin].view(tokens, config.kv_heads, config.head_dim)
        self.v = self.qkv[:, v_begin:].view(tokens, config.kv_heads, config.head_dim)
        self.attended = arena.view("attended", tokens)
        """[tokens, q_width]: the outputs of all heads, concatenated."""
        self.heads_out = self.attended.view(tokens, config.heads, config.head_dim)
        self.to_feed_forward = arena.view("to_feed_forward", tokens)
        """[tokens, width]: the attention branch before its addition, then norm(x')."""
        self.gate_up = arena.view("gate_up", tokens)
        """[tokens, 2 * ffn_width]"""
        self.gated = arena.view("gated", tokens) if "gated" in arena else None
        """[tokens, ffn_width]: SiLU(gate) * up, where it does not overwrite the gate."""


class Block:
    """Seven matrices, four of them fused into two, and the norms before each branch."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
        ranks: Ranks | None = None,
    ) -> None:
        norm = partial(RMSNorm, kernels, epsilon=config.norm_epsilon, dtype=dtype, device=device)
        self._kernels = kernels
        self._ranks = ranks
        self._prefix = f"model.layers.{layer}."
        self._quantised = kept_quantised(config, panels=kernels.panels)
        self._matrices = BlockMatrices.of(config, layer)
        self._stored_fp8 = config.stored_fp8
        numbers = "" if kernels.fp8 is None else FP8_KIND
        linear = partial(fused_linear, kernels, quantised=self._quantised, numbers=numbers)
        self.attention_norm = norm(config.width)
        self.qkv = linear(self._matrices.qkv)
        self.q_norm = norm(config.head_dim) if config.qk_norm else None
        self.k_norm = norm(config.head_dim) if config.qk_norm else None
        self.output = linear(self._matrices.output)
        self.feed_forward_norm = norm(config.width)
        self.gate_up = linear(self._matrices.gate_up)
        self.down = linear(self._matrices.down)

    def attention_branch(self, layer: int, rope: Tensor, attention: AttentionBackend, step: Activations) -> None:
        """Read norm(x) from to_attention, leave what is added to x in to_feed_forward."""
        self.qkv(step.to_attention, out=step.qkv)
        if self.q_norm is not None and self.k_norm is not None:
            self.q_norm(step.q, out=step.q)
            self.k_norm(step.k, out=step.k)
        self._kernels.rotate(step.q, step.k, step.positions, rope)
        attention.forward(layer, step.q, step.k, step.v, out=step.heads_out)
        self._add_up(self.output, step.attended, out=step.to_feed_forward)

    def feed_forward_branch(self, step: Activations) -> None:
        """Read norm(x') from to_feed_forward, leave what is added to x' in to_attention, for the block above."""
        if isinstance(self.gate_up, GatedLinear):
            gated = self.gate_up.gated(step.to_feed_forward, out=step.gate_up)
        else:
            self.gate_up(step.to_feed_forward, out=step.gate_up)
            gated = self._kernels.silu_mul(step.gate_up, step.gated)
        self._add_up(self.down, gated, out=step.to_attention)

    def _add_up(self, linear: Linear, x: Tensor, out: Tensor) -> None:
        """Write a product to out: of a divided matrix the sum of all ranks' products."""
        if self._ranks is None:
            linear(x, out=out)
        else:
            self._ranks.multiply(linear, x, out)

    def linears(self) -> tuple[Linear, ...]:
        """The matrices, fused as they are computed."""
        return self.qkv, self.output, self.gate_up, self.down

    def norms(self) -> tuple[RMSNorm, ...]:
        """All norms of the block."""
        norms = (self.attention_norm, self.q_norm, self.k_norm, self.feed_forward_norm)
        return tuple(norm for norm in norms if norm is not None)

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        """Where the checkpoint's tensors go, by their Hugging Face names."""
        for linear, matrix in zip(self.linears(), self._matrices.all(), strict=True):
            yield from destinations(linear, matrix, self._quantised, stored_fp8=self._stored_fp8)
        yield _vector(self._prefix + "input_layernorm.weight", self.attention_norm)
        yield _vector(self._prefix + "post_attention_layernorm.weight", self.feed_forward_norm)
        if self.q_norm is not None and self.k_norm is not None:
            yield _vector(self._prefix + "self_attn.q_norm.weight", self.q_norm)
            yield _vector(self._prefix + "self_attn.k_norm.weight", self.k_norm)


class Transformer:
    """The whole model. It owns the weights; activations live in an arena, K and V in the attention backend's store."""

    def __init__(
        self,
        config: ModelConfig,
        kernels: Kernels,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_positions: int,
        ranks: Ranks | None = None,
    ) -> None:
        """With `ranks`, config holds the shapes of one of them."""
        self.config = config
        self.kernels = kernels
        self.dtype = dtype
        self.ranks = ranks
        self._quantised = kept_quantised(config, panels=kernels.panels)
        self._tables = vocabulary_matrices(config)
        tables = [fused_linear(kernels, table, self._quantised) for table in self._tables]
        self.embedding, self.head = tables[0], tables[-1]
        self.blocks = [Block(config, layer, kernels, dtype, device, ranks) for layer in range(config.layers)]
        self.final_norm = RMSNorm(kernels, config.width, config.norm_epsilon, dtype, device)
        self.rope = rope_table(config, max_positions).to(device)
        """A table of every forward, counted with the activations."""

    @property
    def weights_nbytes(self) -> int:
        """Bytes of everything that never changes: matrices (tied ones once) and norms."""
        norms = [self.final_norm, *(norm for block in self.blocks for norm in block.norms())]
        parts = [linear.nbytes for linear in self.linears()]
        return sum(parts) + sum(norm.weight.nbytes for norm in norms)

    @cached_property
    def scratch_nbytes(self) -> int:
        """Bytes that each thread keeps beside the weights, for the matrix that needs most."""
        return max(linear.scratch_nbytes for linear in self.linears())

    def linears(self) -> list[Linear]:
        """All matrices, each once."""
        tables = [self.head] if self.config.tied_embeddings else [self.embedding, self.head]
        return tables + [linear for block in self.blocks for linear in block.linears()]

    def destinations(self) -> dict[str, Destination]:
        """Where the checkpoint's tensors go, by their Hugging Face names. A tied head is loaded as the embedding."""
        found: dict[str, Destination] = {}
        for linear, table in zip((self.embedding, self.head), self._tables, strict=False):
            found.update(destinations(linear, table, self._quantised))
        for block in self.blocks:
            found.update(block.destinations())
        found.update([_vector("model.norm.weight", self.final_norm)])
        return found

    def forward(
        self,
        arena: ActivationArena,
        tokens: int,
        attention: AttentionBackend,
        observe: Callable[[Tensor], None] | None = None,
    ) -> None:
        """Run the tokens in the arena's areas `tokens` and `positions` through all blocks.

        The number of tokens includes padding up to the kernels' row multiple. What meets the LM head, the final norm
        of the spine, is left in the area `to_attention`. Each addition to the spine is fused with the norm after it:
        the second one of a block with the first norm of the block above.

        observe hears everything that is ever added to the spine, [tokens, width] and before it is added: first the
        embedding, then the contributions of each block's two branches. The tensor is a view that is overwritten later.
        """
        step = Activations(arena, self.config, tokens)
        self._embed(arena.view("tokens", tokens)[:, 0], out=step.spine)
        if observe is not None:
            observe(step.spine)
        self.blocks[0].attention_norm(step.spine, out=step.to_attention)
        norms_above = [*(block.attention_norm for block in self.blocks[1:]), self.final_norm]
        for layer, (block, norm_above) in enumerate(zip(self.blocks, norms_above, strict=True)):
            block.attention_branch(layer, self.rope, attention, step)
            if observe is not None:
                observe(step.to_feed_forward)
            block.feed_forward_norm(step.spine, out=step.to_feed_forward, branch=step.to_feed_forward)
            block.feed_forward_branch(step)
            if observe is not None:
                observe(step.to_attention)
            norm_above(step.spine, out=step.to_attention, branch=step.to_attention)

    def _embed(self, token_ids: Tensor, out: Tensor) -> None:
        """Copy the embeddings of token_ids, int32 [tokens], to out [tokens, width]."""
        if self.ranks is None:
            self.embedding.gather(token_ids, out=out)
        else:
            self.ranks.embed(self.embedding, token_ids, out)

    def logits(self, arena: ActivationArena, rows: Tensor) -> Tensor:
        """Return the logits of some of the forward's tokens, float32 [rows, vocabulary], a view until the next call.

        rows: indices of tokens, int32 or int64, at most the arena's max_rows.
        """
        count = rows.shape[0]
        multiple = self.kernels.row_multiple
        padded = -(-count // multiple) * multiple
        picked = arena.view("picked", padded)
        torch.index_select(arena.view("to_attention", arena.max_tokens), 0, rows, out=picked[:count])
        picked[count:].zero_()
        logits = arena.view("logits", padded)
        self.head(picked, out=logits)
        if self.ranks is not None:
            self.ranks.gather(logits[:count])
        return self.computed_logits(arena, count)

    def computed_logits(self, arena: ActivationArena, rows: int) -> Tensor:
        """The logits of the last call of `logits`, float32 [rows, vocabulary]."""
        return arena.view("logits", rows) if self.ranks is None else self.ranks.logits(rows)


def _vector(name: str, norm: RMSNorm) -> tuple[str, Destination]:
    return name, Destination(tuple(norm.weight.shape), norm.load)
