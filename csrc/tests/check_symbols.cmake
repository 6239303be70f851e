# Fails if an object file built for one instruction set defines a symbol outside namespace octavo::<isa>: the linker
# could choose it for callers that run on machines without that set.
foreach(object IN LISTS OBJECTS)
  execute_process(COMMAND ${NM} -C --defined-only ${object} OUTPUT_VARIABLE output COMMAND_ERROR_IS_FATAL ANY)
  string(REPLACE "\n" ";" lines "${output}")
  foreach(line IN LISTS lines)
    # Global or weak symbols only: lower-case types other than u, v, w are local to the object.
    if(line MATCHES "^[0-9a-fA-F]+ [A-Zuvw] (.*)$")
      set(symbol "${CMAKE_MATCH_1}")
      if(NOT symbol MATCHES "octavo::${ISA}::" AND NOT symbol MATCHES "^DW\\.ref")
        message(SEND_ERROR "${object} defines ${symbol}")
      endif()
    endif()
  endforeach()
endforeach()
