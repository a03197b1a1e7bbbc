/*
 * What generated.rs is made from. It has to be a file, not text handed to bindgen: only then can
 * bindgen evaluate macros such as UFFDIO_COPY, which contain casts and sizeof
 * (Builder::clang_macro_fallback).
 */
#include <linux/kvm.h>
#include <linux/memfd.h>
#include <linux/userfaultfd.h>
