"""Training methods, one a file: objective, features that it needs, how its drafter is made."""
