# Which GPU architectures to build the CUDA encoder for.

set(EMBERT_LEAST_ARCHITECTURE 80) # compute capability 8.0, which every kernel takes for granted: common/capability.h

# The GPUs of this machine as a CMake list, such as 80-real;90a-real. Empty if there is none to build for; `reason`
# then has the cause, as a part of a sentence.
function(embert_architectures_here architectures reason)
  execute_process(
    COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
    OUTPUT_VARIABLE output RESULT_VARIABLE status ERROR_QUIET)
  set(capabilities "")
  if(status EQUAL 0)
    string(REGEX REPLACE "[][;]" "" output "${output}") # brackets and semicolons mean something in a CMake list
    string(REGEX REPLACE "[\r\n]+" ";" lines "${output}")
    foreach(line IN LISTS lines)
      if(line MATCHES "^ *[0-9]+[.][0-9] *$")
        string(STRIP "${line}" line)
        list(APPEND capabilities ${line})
      endif()
    endforeach()
    list(REMOVE_DUPLICATES capabilities)
    list(SORT capabilities COMPARE NATURAL)
  endif()
  set(found "")
  foreach(capability IN LISTS capabilities)
    string(REPLACE "." "" number ${capability})
    if(number EQUAL 90)
      list(APPEND found 90a-real) # with Hopper's own instructions
    elseif(NOT number LESS EMBERT_LEAST_ARCHITECTURE)
      list(APPEND found ${number}-real)
    endif()
  endforeach()
  set(${architectures} "${found}" PARENT_SCOPE)
  if(NOT capabilities)
    set(${reason} "there is no NVIDIA GPU here; EMBERT_CUDA=ON would build the CUDA encoder all the same" PARENT_SCOPE)
  elseif(NOT found)
    list(JOIN capabilities " " joined)
    set(${reason} "the GPU here has compute capability ${joined}; the CUDA encoder needs 8.0 or newer" PARENT_SCOPE)
  endif()
endfunction()

# Machine code for all architectures that we tune for and this nvcc supports, and one PTX that newer GPUs compile at load: 90a has no
# successor, so the PTX is 90.
function(embert_every_architecture nvcc architectures)
  execute_process(COMMAND "${nvcc}" --list-gpu-arch OUTPUT_VARIABLE known COMMAND_ERROR_IS_FATAL ANY)
  set(found "")
  foreach(architecture IN ITEMS 80 86 89 90a 100 120)
    string(REPLACE "a" "" number ${architecture}) # nvcc lists 90, never 90a
    if(known MATCHES "compute_${number}[\r\n]")
      list(APPEND found ${architecture}-real)
    endif()
  endforeach()
  if(known MATCHES "compute_90[\r\n]")
    list(APPEND found 90-virtual)
  else()
    list(APPEND found 80-virtual)
  endif()
  set(${architectures} "${found}" PARENT_SCOPE)
endfunction()
