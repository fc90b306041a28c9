"""An OpenAI-compatible server over an engine; needs the extra `pillarattn[serve]`."""

from pillarattn.engine.server.app import create_app

__all__ = ["create_app"]
