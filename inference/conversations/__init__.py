"""Reading of prompts and conversations, in the formats in which people store them."""
