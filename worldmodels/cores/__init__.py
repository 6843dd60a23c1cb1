"""The cores, one paper's model a file; this is the one table of their names.

An entry is a constructor's path and what differs from the constructor's defaults where the core is a world model's
transition. An installed package adds cores under the entry point ``worldmodels.cores``. Readers of whole sequences, which
``core=`` names as well, have a table of their own.
"""

from typing import Any

CORES: dict[str, dict[str, Any]] = {
    "gnn": {"_target_": "worldmodels.cores.gnn.GNN"},
    "snps": {"_target_": "worldmodels.cores.nps.SNPS"},
    "pnps": {"_target_": "worldmodels.cores.nps.PNPS"},
    "routing": {"_target_": "worldmodels.cores.nps.RoutingNPS"},
    "lstm": {"_target_": "worldmodels.cores.lstm.LSTM", "slot_size": 64},
    "gru": {"_target_": "worldmodels.cores.gru.GRU", "slot_size": 64},
    "rims": {"_target_": "worldmodels.cores.rims.RIMs", "slot_size": 64},
    "scoff": {"_target_": "worldmodels.cores.scoff.SCOFF", "slot_size": 64},
    "scoff_pp": {
        "_target_": "worldmodels.cores.scoff.SCOFF",
        "slot_size": 64,
        "num_schemata": 1,
        "compete": "iterative",
    },
    "s2gru": {"_target_": "worldmodels.cores.s2rm.S2GRU", "slot_size": 64},
    "s2rmc": {"_target_": "worldmodels.cores.s2rm.S2RMC", "slot_size": 64},
    "rmc": {"_target_": "worldmodels.cores.rmc.RMC", "slot_size": 64},
    "entnet": {"_target_": "worldmodels.cores.entnet.EntNet", "slot_size": 64},
    "esbn": {"_target_": "worldmodels.cores.esbn.ESBN", "slot_size": 64},
    "ntm": {"_target_": "worldmodels.cores.ntm.NTM", "slot_size": 64},
    "mnm": {"_target_": "worldmodels.cores.mnm.MNM", "slot_size": 64},
    "cin": {"_target_": "worldmodels.cores.cin.CIN"},
    "op3": {"_target_": "worldmodels.cores.op3.OP3"},
    "rules": {"_target_": "worldmodels.cores.rules.Rules"},
    "mlp": {"_target_": "worldmodels.cores.mlp.MLP"},
}

READERS: dict[str, dict[str, Any]] = {
    "transformer": {"_target_": "worldmodels.cores.transformer.Transformer"},
    "relation_network": {"_target_": "worldmodels.cores.relation_network.RelationNetwork"},
    "temporal_relation_network": {"_target_": "worldmodels.cores.relation_network.TemporalRelationNetwork"},
    "predinet": {"_target_": "worldmodels.cores.predinet.PrediNet"},
}
