"""Targets: loaded, spread over devices, or stored as features; models behind one interface."""
