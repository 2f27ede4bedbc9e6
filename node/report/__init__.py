"""How a run stands and how it went: from signed records, and from event logs."""
