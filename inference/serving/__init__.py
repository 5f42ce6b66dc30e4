"""The local server: requests in OpenAI's form, decoded together, and a page to chat on."""
