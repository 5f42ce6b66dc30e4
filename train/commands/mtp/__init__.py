"""Commands about the MTP layers that targets are published with."""
