"""Texts of the results of an MCP server's tools."""

from __future__ import annotations

import json
from typing import Any


def format_result(result: Any) -> str:
    """Return the SDK's ``CallToolResult`` as the text that the policy is shown."""
    parts = [_part(content) for content in result.content]
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    return "\n".join(parts) or "(nothing)"


def _part(content: Any) -> str:
    if content.type == "text":
        return content.text
    if content.type in ("image", "audio"):
        return f"[{content.type}: {content.mime_type}, {len(content.data) * 3 // 4} bytes]"
    if content.type == "resource_link":
        return f"[link: {content.name}, {content.uri}]"
    resource = content.resource
    if hasattr(resource, "text"):
        return resource.text
    return f"[file: {resource.uri}, {resource.mime_type}, {len(resource.blob) * 3 // 4} bytes]"
