"""Our attention over packed documents in torchtitan, as one of its overrides of configurations.

    --override.imports flashmoe_science.integrations.torchtitan.varlen_attention

It takes the place of ``VarlenAttention``, which models are made with by ``attn_backend="varlen"``. FlexAttention and
SDPA stay as they are. Torchtitan finds an override by the name of its function, once its module was imported.

Source: torchtitan 0.3, models/common/attention.py and config/override.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..attention.varlen import flash_attention_varlen
from ..errors import InputError, MissingPackageError, UnsupportedError, shown

try:
    import spmd_types as spmd
    from spmd_types.runtime import get_partition_spec
    from torchtitan.config.override import derive, override
    from torchtitan.models.common.attention import VarlenAttention, VarlenMetadata
except ImportError as error:
    raise MissingPackageError(
        f"torchtitan cannot be imported: {error}", hint='pip install "torchtitan>=0.3,<0.4"'
    ) from error

__all__ = ["PackedAttention", "varlen_attention"]


class PackedAttention(VarlenAttention):  # type: ignore[misc] # torchtitan is optional, and not looked into
    """What ``VarlenAttention`` computes, in the dtype of the values; it casts all to bf16."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):  # type: ignore[misc] # the same
        """That of ``VarlenAttention``: ``window_size``, (left, right), -1 for no bound."""

    def __init__(self, config: Config) -> None:
        super(VarlenAttention, self).__init__()  # its own would choose a version of FlashAttention
        self.window_size = config.window_size

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: VarlenMetadata,
        scale: float | None = None,
        out_transform: Callable[[Tensor, Tensor], Tensor] | None = None,
        enable_gqa: bool = False,  # noqa: ARG002 torchtitan's layers hand it over by this name
        **others: Any,
    ) -> Tensor:
        """Attend every token to those of its own document.

        Args:
            q_BLNH: ``[B, L, H, D]`` fp16, bf16 or fp32. It is cast to the dtype of the values, as norms may have left
                it in fp32; so are the keys.
            k_BLNH: ``[B, L, HK, D]``.
            v_BLNH: ``[B, L, HK, DV]``.
            attention_masks: where documents start in the B * L tokens.
            scale: factor on the scores. Default ``D ** -0.5``.
            out_transform: takes the output and its log-sum-exp ``[B, L, H]`` fp32, and returns what is returned.
            enable_gqa: says nothing that the heads do not.
            **others: None; what is not known is not served.

        Returns:
            ``[B, L, H, DV]`` in the dtype of the queries.

        Raises:
            InputError: an argument breaks the contract above.
            UnsupportedError: another keyword is given, or no kernel serves this call.
        """
        if not isinstance(attention_masks, VarlenMetadata):
            raise InputError(f"attention_masks must be VarlenMetadata, got {shown(attention_masks)}")
        if given := sorted(name for name, value in others.items() if value is not None):
            raise UnsupportedError(f"{', '.join(given)} of torchtitan's attention is not served by flashmoe_science")
        batch, length = q_BLNH.shape[:2]
        q, k, v = (x.flatten(0, 1) for x in (q_BLNH.to(v_BLNH.dtype), k_BLNH.to(v_BLNH.dtype), v_BLNH))
        with spmd.no_typecheck():
            found = flash_attention_varlen(
                q,
                k,
                v,
                attention_masks.cu_seq_q,
                attention_masks.cu_seq_k,
                attention_masks.max_q,
                attention_masks.max_k,
                window=self.window_size,
                softmax_scale=scale,
                return_lse=out_transform is not None,
            )
        o, lse = (found, None) if out_transform is None else found
        if spmd.is_type_checking():
            spec = get_partition_spec(q)
            spmd.assert_type(o, spmd.get_local_type(q), spec)
            if lse is not None:
                rows = None if spec is None else spmd.PartitionSpec(spec[1], spec[0])
                spmd.assert_type(lse, spmd.get_local_type(q), rows)
        result: Tensor = o.view(batch, length, *o.shape[1:]).to(q_BLNH.dtype)
        if out_transform is None or lse is None:
            return result
        return out_transform(result, lse.T.reshape(batch, length, -1))


@override(target=VarlenAttention.Config, exact=True, description="Packed documents by flashmoe_science")  # type: ignore[untyped-decorator] # the same
def varlen_attention(config: VarlenAttention.Config) -> PackedAttention.Config:
    """Return the configuration of our attention in the place of torchtitan's.

    Args:
        config: of ``VarlenAttention``: its window, and how it is sharded, are kept.
    """
    ours: PackedAttention.Config = derive(config, PackedAttention.Config)
    return ours
