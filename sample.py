"""Draw images from a checkpoint, or complete partial ones: `python sample.py --help`."""

from imagegen.commands.sample import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
