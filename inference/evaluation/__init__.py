"""Everything that measures: evaluation, comparison, tuning, simulation, running servers,
reports."""
