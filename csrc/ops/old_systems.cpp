// For wheels of Linux, which run on systems as old as manylinux_2_28: what GCC 12 would take from a newer
// glibc and libstdc++ is defined here.
#include <sstream>

// libstdc++'s shared_ptr asks this variable of glibc 2.32 whether atomic operations may be left out. They may
// not.
extern "C" char __libc_single_threaded;
char __libc_single_threaded = 0;

// Their constructors without arguments are symbols of libstdc++ 9.
template class std::basic_ostringstream<char>;
template class std::basic_stringstream<char>;
