"""The cores, one paper's model a file; this is the one table of their names.

An entry is a constructor's path and what differs from the constructor's defaults where the core is a world model's
transition. An installed package adds cores under the entry point ``worldmodels.cores``.
"""

from typing import Any

CORES: dict[str, dict[str, Any]] = {
    "gnn": {"_target_": "worldmodels.cores.gnn.GNN"},
    "snps": {"_target_": "worldmodels.cores.nps.SNPS"},
    "pnps": {"_target_": "worldmodels.cores.nps.PNPS"},
    "gru": {"_target_": "worldmodels.cores.gru.GRU", "slot_size": 64},
    "mlp": {"_target_": "worldmodels.cores.mlp.MLP"},
}
