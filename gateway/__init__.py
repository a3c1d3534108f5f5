"""The HTTP front: a metering gateway, wire-compatible with Anthropic's Messages API."""
