// Example messages: requests, and beginnings of functions for a target that writes code or continues
// texts.

export const REQUESTS = [
  ["Code", "Write a Python function that returns the largest number of a list."],
  ["Explain", "Explain in three sentences why the sky is blue."],
  ["Rewrite", "Rewrite this politely: Send me the report now, I have waited long enough."],
  ["Arithmetic", "A train covers 60 km in 45 minutes. What is its speed in km/h? Show the steps."],
  ["Translate", "Translate into French: The library opens at nine and closes at six."],
  ["Summarise", "Summarise in one sentence: Bees visit flowers for nectar. Pollen sticks to their " +
    "legs, and they carry it to the next flower. Without them many plants would bear no fruit."],
];

export const CODE = [
  ["Compare", "def __eq__(self, other):"],
  ["Construct", "def __init__(self, name, values=None):"],
  ["Check", 'def is_empty(self):\n    """Return True if the queue holds no items."""'],
  ["Convert", 'def to_dict(self):\n    """Return the settings as a dictionary."""'],
  ["Read", 'def read_lines(path):\n    """Return the lines of a text file."""'],
  ["Describe", "def __repr__(self):"],
];
