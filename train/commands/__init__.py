"""The console commands; a command's module is imported when the command runs."""
