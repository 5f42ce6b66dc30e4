"""How a drafter is used: the target and its cache, trees, acceptance, proposers, the decode loop, evaluation."""
