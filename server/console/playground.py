"""The playground: the page's script asks several models side by side, through the API."""

from fastapi import APIRouter, Response

from server.console.page_route import PageRoute
from server.console.rendering import render
from server.console.viewers import InferenceViewer

router = APIRouter(prefix="/playground", route_class=PageRoute)


@router.get("")
async def show(viewer: InferenceViewer) -> Response:
    """Show the page. Its models and answers come to it from the API."""
    return render("playground.html", viewer)
