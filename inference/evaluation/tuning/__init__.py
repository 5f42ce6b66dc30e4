"""Choice of the draft tree that gives the most tokens a second on one machine."""
