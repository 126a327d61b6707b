"""Give Liger's RMSNorm the arguments of the operator of examples/rms_norm."""

from liger_kernel.ops import LigerRMSNormFunction


def rms_norm(x, weight, *, eps):
    """Return x / sqrt(mean(x ** 2) + eps) * weight."""
    return LigerRMSNormFunction.apply(x, weight, eps)
