"""Everything that measures: evaluation, comparison, tuning, simulation, live servers, reports."""
