"""Weight formats, one file each: how a matrix is stored, cut, stacked, rounded and multiplied."""
