"""The report page: charts, tables and sections of one HTML file."""
