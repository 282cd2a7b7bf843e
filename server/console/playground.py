"""The playground: the page's script asks several models side by side, through the API."""

from fastapi import Response

from server.console.page_route import pages_router
from server.console.rendering import render
from server.console.viewers import InferenceViewer

router = pages_router("/playground")


@router.get("")
async def show(viewer: InferenceViewer) -> Response:
    """Show the page. Its models and answers come to it from the API."""
    return render("playground.html", viewer)
