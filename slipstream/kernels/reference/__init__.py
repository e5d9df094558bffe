"""Plain torch, written to be read. Every fast column is compared with this one."""
