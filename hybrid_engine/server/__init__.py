"""An HTTP server with OpenAI's API around one engine. See docs/SERVER.md."""
