"""Ready-made hooks: what most trainers do to rows between rollout, buffer and update.

Pass them as `Store(ingestion=[GAE(gamma=0.99, lam=0.95), Normalize("advantage")], delivery=[ToFloat("obs")])`.
"""

from conduit.transforms.advantage import GAE, Returns
from conduit.transforms.scale import Normalize, ToFloat

__all__ = ["GAE", "Normalize", "Returns", "ToFloat"]
